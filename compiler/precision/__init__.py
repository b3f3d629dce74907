"""Precision and math fidelity by tensor group, op group, layer and model. Imports no torch."""

from __future__ import annotations

from tilewright.compiler.precision.auto import AUTO, choose_precision
from tilewright.compiler.precision.config import PrecisionConfig
from tilewright.compiler.precision.fragment import Fragment, LayerRule
from tilewright.compiler.precision.hits import GroupedModule
from tilewright.compiler.precision.names import (
    ALWAYS_HIGH,
    BLOCK_OUTPUTS,
    DRAFT_SCOPE,
    EXPERT_GROUPS,
    FOLLOWS,
    MIXED,
    MIXED_ACTIVATION,
    OP_FAMILIES,
    OP_GROUP_OF,
    OP_GROUPS,
    PHASES,
    STORED,
    TENSOR_GROUPS,
    Phase,
    normalise_model_name,
    output_format,
)
from tilewright.compiler.precision.reading import list_precisions, load_precision, parse_heading
from tilewright.compiler.precision.resolve import (
    ExplainRow,
    PrecisionSummary,
    ResolvedPrecision,
    effective_id,
)

__all__ = [
    "ALWAYS_HIGH",
    "AUTO",
    "BLOCK_OUTPUTS",
    "DRAFT_SCOPE",
    "EXPERT_GROUPS",
    "FOLLOWS",
    "MIXED",
    "MIXED_ACTIVATION",
    "OP_FAMILIES",
    "OP_GROUPS",
    "OP_GROUP_OF",
    "PHASES",
    "STORED",
    "TENSOR_GROUPS",
    "ExplainRow",
    "Fragment",
    "GroupedModule",
    "LayerRule",
    "Phase",
    "PrecisionConfig",
    "PrecisionSummary",
    "ResolvedPrecision",
    "choose_precision",
    "effective_id",
    "list_precisions",
    "load_precision",
    "normalise_model_name",
    "output_format",
    "parse_heading",
]
