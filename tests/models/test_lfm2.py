"""LFM2: short convolutions with gates, and attention, on every target."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin
from tilewright.models.checkpoints.huggingface.config import config_of_hf

ON_CUDA: dict[str, Any] = {"num_layers": 2, "conv_layers": (0,)}
SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {"num_layers": 3, "conv_layers": (0, 2)},
    "wide": {"conv_layers": (1,), "conv_width": 5, "tie_embeddings": False},
}


def _changes(config: Any) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {
        "layer_types": [
            "conv" if layer in config.conv_layers else "full_attention" for layer in layers
        ],
        "conv_L_cache": config.conv_width,
        "norm_eps": config.norm_eps,
        "block_auto_adjust_ff_dim": False,
    }


TWIN = Twin(transformers.Lfm2Config, transformers.Lfm2ForCausalLM, _changes)


def make(shape: str = "as_published") -> Any:
    return tiny_model(std=0.3, model_type="lfm2", **SHAPES[shape])


NOT_READ: checks.NotRead = [
    ({"conv_bias": True}, "conv_bias = True"),
    ({"conv_L_cache": 1}, "conv_L_cache = 1"),
    ({"layer_types": ["conv"]}, "layer_types.*3 of full_attention, conv"),
    ({"layer_types": ["conv", "mamba", "conv"]}, "layer_types = 'mamba'"),
    ({"layer_types": None, "full_attn_idxs": [3]}, r"full_attn_idxs = \[3\].*from 0 to 2"),
]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 8192),  # LFM2-1.2B: 12288 before the reduction
        ({"block_ff_dim": 6656}, 4608),
        ({"block_auto_adjust_ff_dim": False, "intermediate_size": 100}, 100),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 1000}, 13000),
    ],
)
def test_inner_sizes_are_transformers(changes: dict[str, Any], size: int) -> None:
    values: dict[str, Any] = {"model_type": "lfm2", "vocab_size": 61, "hidden_size": 32}
    values |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    values |= {"full_attn_idxs": [0], "intermediate_size": 12288, **changes}
    assert config_of_hf(values, where="config.json").intermediate_size == size
    theirs = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**values))
    assert theirs.model.layers[0].feed_forward.w1.out_features == size
