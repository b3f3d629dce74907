"""The dense models of Granite 4, on every target."""

from __future__ import annotations

from typing import Any

import transformers

from tests import architecture_checks as checks
from tests.models.test_granite import ON_CUDA as FACTORS
from tests.models.test_granite import factors
from tests.tiny import tiny_model
from tests.twins import Twin

ON_CUDA: dict[str, Any] = FACTORS


def _changes(config: Any) -> dict[str, Any]:
    return {
        **factors(config),
        "shared_intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * config.num_layers,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    }


TWIN = Twin(transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM, _changes)


SHAPES: dict[str, dict[str, Any]] = {"wide": {"hidden_size": 64}}


def make(shape: str = "wide") -> Any:
    return tiny_model(std=0.2, model_type="granitemoehybrid", **SHAPES[shape], **FACTORS)


NOT_READ: checks.NotRead = [
    ({"num_local_experts": 8}, "num_local_experts = 8"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*2 of attention"),
    ({"layer_types": None}, "layer_types = None"),
    ({"position_embedding_type": None}, "position_embedding_type = None.*allowed: rope"),
]
