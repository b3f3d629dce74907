"""Qwen3-Next: Qwen3.5's mixtures of experts, whose tensors are stored in other pieces."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.test_qwen3_5_moe import SIZES, moe_keys
from tests.models.test_qwen3_moe import stacked
from tests.tiny import tiny_model
from tests.twins import Twin
from tilewright.models.config import DeltaShape

SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {},
    "with_a_dense_layer": {"dense_layers": (1,)},
}

ON_CUDA: dict[str, Any] = {
    **SIZES,
    **{"num_layers": 1, "linear_layers": (True,), "delta": DeltaShape(1, 1, 8, 8, 2)},
    **{"num_experts": 3, "expert_size": 16, "shared_size": 16},
}


def _changes(config: Any) -> dict[str, Any]:
    return {
        **moe_keys(config),
        "norm_topk_prob": config.renormalise,
        "mlp_only_layers": list(config.dense_layers),
    }


TWIN = Twin(transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, _changes, stacked)


def make(shape: str = "as_published") -> Any:
    return tiny_model(std=0.2, model_type="qwen3_next", **{**SIZES, **SHAPES[shape]})
