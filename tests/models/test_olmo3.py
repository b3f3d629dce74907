"""OLMo 3: norms over all heads and after blocks, and two rotations, on every target."""

from __future__ import annotations

from typing import Any

import transformers

from tests import architecture_checks as checks
from tests.tiny import compiled as compile_tiny
from tests.tiny import precision_of, prefill, random_tokens, tiny_model
from tests.twins import Twin, twin_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.checkpoints.spelling.rope import hf_rope_values
from tilewright.models.config import RopeConfig, YarnScaling

_SECOND = {"second_rope": RopeConfig(500.0)}
ON_CUDA: dict[str, Any] = {**_SECOND, "num_layers": 2, "second_layers": (1,), "windows": (0, 4)}
YARN = RopeConfig(500000.0, YarnScaling(8.0, 32, 1.2079441541679836))
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {**_SECOND, "second_layers": (0,), "windows": (5, 0)},
    "yarn": {
        **{"num_layers": 3, "second_layers": (0, 1), "windows": (3, 3, 0), "rope": YARN},
        **{"second_rope": RopeConfig(500000.0), "tie_embeddings": False},
    },
}


def _changes(config: Any) -> dict[str, Any]:
    full = hf_rope_values(config.rope, config.head_dim)
    sliding = hf_rope_values(config.second_rope, config.head_dim)
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ],
        "sliding_window": max(config.windows),
        "pad_token_id": 0,
    }


TWIN = Twin(transformers.Olmo3Config, transformers.Olmo3ForCausalLM, _changes)


def make(shape: str = "grouped") -> Any:
    sizes = {"hidden_size": 64, "head_dim": 16}
    return tiny_model(std=0.2, model_type="olmo3", **sizes, **SHAPES[shape])


NOT_READ: checks.NotRead = [
    ({"layer_types": ["full_attention"]}, "layer_types.*2 of full_attention"),
    ({"sliding_window": 0}, "sliding_window = 0"),
    ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
]


def test_products_of_unequal_formats_are_normed_in_their_columns() -> None:
    """q, k and v of unequal formats are separate linears with a common buffer."""
    tokens = random_tokens(19)
    precision = precision_of("bf16", layers="*.self_attn.k_proj: {wqkv: bfp8}")
    expected = prefill(compile_tiny(make(), precision=precision), tokens)
    executable = compile_tiny(make(), "cpu-native", precision=precision)
    checks.assert_near(prefill(executable, tokens, [6, 1]), expected)
    executable.close()


def test_an_older_scaling_is_of_full_attention_only() -> None:
    values = twin_of(make().config).config.to_dict()
    del values["rope_parameters"]
    scaling = {"rope_type": "linear", "factor": 4.0}
    older = {"rope_theta": 1e4, "rope_scaling": scaling}
    config: Any = config_of_hf(values | older, where="config.json")
    assert config.second_rope == RopeConfig(1e4) and config.rope.scaling.factor == 4.0
