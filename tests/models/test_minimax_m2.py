"""MiniMax-M2: norms over all heads, a partial rotation and a sigmoid router, on every target."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from tests import architecture_checks as checks
from tests.models.test_qwen3_moe import stacked
from tests.tiny import tiny_model
from tests.twins import Twin, twin_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import RopeConfig

SIZES: dict[str, Any] = {
    **{"rope": RopeConfig(5e6, num_rotated=8), "tie_embeddings": False, "intermediate_size": 24},
    **{"num_experts": 6, "experts_per_token": 2, "expert_size": 24},
}
ON_CUDA: dict[str, Any] = {**SIZES, "num_experts": 4}
_NAMES = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def _changes(config: Any) -> dict[str, Any]:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' names, with stacked experts."""
    theirs = {}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for part, replacement in _NAMES.items():
            name = name.replace(part, replacement)
        theirs[name] = tensor
    return stacked(theirs)


TWIN = Twin(transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM, _changes, renamed)


SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {},
    "single_layer": {"num_layers": 1, "num_experts": 5, "experts_per_token": 3},
}


def make(shape: str = "as_published") -> Any:
    return tiny_model(std=0.2, model_type="minimax_m2", **{**SIZES, **SHAPES[shape]})


NOT_READ: checks.NotRead = [
    ({"rotary_dim": 4}, "rotary_dim = 4.*allowed: 8, as partial_rotary_factor"),
    ({"use_qk_norm": False}, "use_qk_norm = False"),
    ({"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
    ({"attn_type_list": [1, 0]}, "attn_type_list.*2 of 1"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
]


def test_published_keys_are_read() -> None:
    values = twin_of(make().config).config.to_dict()
    del values["rope_parameters"]
    values |= {"rotary_dim": 8, "rope_theta": 5e6, "attn_type_list": [1, 1], "use_qk_norm": True}
    values |= {"qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"}
    config: Any = config_of_hf(values, where="config.json")
    assert config.rope == RopeConfig(5e6, num_rotated=8) and config.num_experts == 6
