"""Qwen3.5's mixtures of experts, on every target, and from a folder."""

from __future__ import annotations

from typing import Any

import transformers

from tests.tiny import tiny_model
from tests.twins import Twin
from tilewright.models.config import DeltaShape, HybridConfig, RopeConfig

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "rope": RopeConfig(theta=1e7, num_rotated=16),
    "linear_layers": (True, True, True, False),
    "delta": DeltaShape(2, 4, 16, 16, 4),
    "intermediate_size": 24,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_size": 24,
    "shared_size": 40,
}

SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {},
    "unequal_sizes": {
        **{"linear_layers": (False, True, True), "num_layers": 3, "head_dim": 64},
        **{"delta": DeltaShape(1, 3, 8, 24, 3), "tie_embeddings": True},
    },
}

ON_CUDA: dict[str, Any] = {
    **SIZES,
    **{"num_layers": 2, "linear_layers": (True, False), "num_heads": 2, "num_kv_heads": 1},
    **{"delta": DeltaShape(1, 2, 8, 24, 3), "num_experts": 4, "shared_size": 16},
}


def delta_keys(config: HybridConfig) -> dict[str, Any]:
    kinds = ("full_attention", "linear_attention")
    return {
        "attention_bias": config.attention_bias,
        "layer_types": [kinds[each] for each in config.linear_layers],
        "linear_num_key_heads": config.delta.num_key_heads,
        "linear_num_value_heads": config.delta.num_value_heads,
        "linear_key_head_dim": config.delta.key_dim,
        "linear_value_head_dim": config.delta.value_dim,
        "linear_conv_kernel_dim": config.delta.conv_width,
    }


def moe_keys(config: HybridConfig) -> dict[str, Any]:
    return {
        **delta_keys(config),
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_size,
    }


TWIN = Twin(transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM, moe_keys)


def make(shape: str = "as_published") -> Any:
    return tiny_model(std=0.2, model_type="qwen3_5_moe", **{**SIZES, **SHAPES[shape]})
