"""Gemma 3's text model: two rotations, caps, GeGLU and norms around 1, on every target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from tests import architecture_checks as checks
from tests.tiny import compiled, prefill, random_tokens, tiny_model
from tests.twins import Twin, twin_of
from tilewright.compiler.driver import trace_model
from tilewright.compiler.ir.info import WEIGHT, info
from tilewright.models.architectures.gemma3_text import Gemma3Config
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.checkpoints.spelling.rope import hf_rope_values
from tilewright.models.config import LinearScaling, RopeConfig


def _changes(config: Any) -> dict[str, Any]:
    full = hf_rope_values(config.rope, config.head_dim)
    sliding = hf_rope_values(config.local_rope, config.head_dim)
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ],
        "sliding_window": max(config.windows),
        "query_pre_attn_scalar": int(config.query_scale),
        "attn_logit_softcapping": config.attention_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
    }


TWIN = Twin(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _changes)

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"windows": (5, 0)},
    "scaled_and_capped": {
        **{"windows": (0, 5), "query_scale": 20.0, "logit_cap": 2.0},
        **{"rope": RopeConfig(1e6, LinearScaling(8.0)), "tie_embeddings": False},
    },
    "three_layers": {
        **{"num_layers": 3, "windows": (3, 3, 0), "local_rope": RopeConfig(500.0)},
        **{"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32},
    },
}


ON_CUDA: dict[str, Any] = {"windows": (4,), "logit_cap": 3.0, "query_scale": 16.0}
"""For tests/targets/cuda."""


def make(shape: str = "grouped", **changes: Any) -> SimpleNamespace:
    values = {"rope": RopeConfig(1e6), "query_scale": 16.0, **SHAPES[shape], **changes}
    return tiny_model(std=0.2, model_type="gemma3_text", **values)


NOT_READ: checks.NotRead = [
    ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu'.*gelu_pytorch_tanh"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ({"layer_types": ["full_attention"]}, "layer_types.*2 of full_attention"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
]


def test_norms_are_kept_as_their_difference_from_one() -> None:
    nodes = trace_model(make()).graph.nodes
    recipes = [info(node).recipe for node in nodes if info(node).role == WEIGHT]
    segments = [segment for recipe in recipes if recipe for segment in recipe.segments]
    offsets = {segment.name: segment.offset for segment in segments}
    assert {name for name, offset in offsets.items() if offset == 1.0} == {
        name for name in offsets if name.endswith("norm.weight")
    }
    assert set(offsets.values()) == {0.0, 1.0} and len(offsets) == 2 * 13 + 2


@pytest.mark.parametrize("target", checks.TARGETS)
def test_capped_scores(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the cap and leaves it unused here, as no Gemma 3 has one: it is given to
    its own attention.
    """
    module = transformers.models.gemma3.modeling_gemma3
    plain = module.eager_attention_forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "softcap": 1.5})

    monkeypatch.setattr(module, "eager_attention_forward", capped)
    model = make(attention_cap=1.5)
    tokens = random_tokens(23)
    theirs = twin_of(model.config, model.checkpoint.tensors)
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected: Tensor = theirs(torch.tensor([tokens])).logits[0]
    uncapped = prefill(compiled(make(), target), tokens)
    assert (uncapped - expected).abs().max() > 1e-2
    checks.assert_near(prefill(compiled(model, target), tokens, [3, 7]), expected)


def test_what_older_files_say_and_leave_out() -> None:
    """The keys of gemma-3-1b-it, and those that gemma-3-4b-it's text part alone has."""
    values: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = config_of_hf(values | {"rope_scaling": scaling}, where="gemma/config.json")
    assert isinstance(config, Gemma3Config) and config.tie_embeddings
    assert config.rope == RopeConfig(1e6, LinearScaling(8.0))
    assert config.local_rope == RopeConfig(10000.0)
    assert config.windows == tuple(0 if layer % 6 == 5 else 1024 for layer in range(34))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    older = {"rope_theta": 5e5, "rope_local_base_freq": 100, "sliding_window_pattern": 2}
    config = config_of_hf({**values, **older}, where="gemma/config.json")
    assert isinstance(config, Gemma3Config)
    assert (config.rope.theta, config.local_rope.theta) == (5e5, 100.0)
    assert config.windows[:4] == (1024, 0, 1024, 0)


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    model = make(num_layers=6, windows=(5, 5, 5, 5, 5, 0))

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(5)

    checks.check_gguf(
        model, tmp_path / "tiny.gguf", architecture=gguf.MODEL_ARCH.GEMMA3, extra=extra
    )


def test_a_gguf_of_the_largest_scales_its_scores_otherwise(tmp_path: Path) -> None:
    """Told by its 62 layers: 5376 / 32 there, hidden size over heads."""
    windows = tuple(0 if layer % 6 == 5 else 5 for layer in range(62))
    model = make(num_layers=62, windows=windows, query_scale=8.0)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(5)
        writer.add_final_logit_softcapping(2.0)

    model.config = dataclasses.replace(model.config, logit_cap=2.0)
    path = tmp_path / "tiny.gguf"
    checks.check_gguf(model, path, architecture=gguf.MODEL_ARCH.GEMMA3, extra=extra)
    assert open_checkpoint(path).config.model_type == "gemma3_text"
