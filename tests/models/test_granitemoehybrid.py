"""The dense models of Granite 4, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import architecture_checks as checks
from tests.models.test_granite import ON_CUDA as FACTORS
from tests.models.test_granite import factors
from tests.tiny import tiny_model
from tests.twins import Twin, assert_eager_equals_twin, twin_of
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.huggingface.config import config_of_hf

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


def make() -> Any:
    return tiny_model(std=0.2, model_type="granitemoehybrid", hidden_size=64, **FACTORS)


def test_eager_logits_and_names_are_transformers(tmp_path: Path) -> None:
    assert_eager_equals_twin(make())
    checks.check_folder(make(), tmp_path / "tiny")


@pytest.mark.parametrize("target", checks.EVERY_TARGET)
def test_logits_on_every_target(target: str) -> None:
    checks.check_logits(make(), target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*2 of attention"),
        ({"layer_types": None}, "layer_types = None"),
        ({"position_embedding_type": None}, "position_embedding_type = None.*allowed: rope"),
    ],
)
def test_what_is_not_read(changes: dict[str, Any], words: str) -> None:
    values = twin_of(make().config).config.to_dict() | changes
    with pytest.raises(CheckpointError, match=words):
        config_of_hf(values, where="config.json")
