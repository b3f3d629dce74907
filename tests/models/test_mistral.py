"""Mistral: a window in every layer, on every target, and from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import assert_eager_equals_twin, twin_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf

SHAPES: dict[str, dict[str, Any]] = {
    "window": {"windows": (5, 5)},
    "short_window": {"windows": (1, 1), "tie_embeddings": False},
    "none": {"num_kv_heads": 4},
}


ON_CUDA: dict[str, Any] = {"windows": (3,)}
"""For tests/targets/cuda."""


def make(shape: str = "window") -> Any:
    return tiny_model(std=0.2, model_type="mistral", **SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
def test_eager_logits_and_names_are_transformers(shape: str) -> None:
    assert_eager_equals_twin(make(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", checks.TARGETS)
def test_logits_on_every_target(target: str, shape: str) -> None:
    checks.check_logits(make(shape), target)


@pytest.mark.parametrize("target", checks.TARGETS)
def test_batches_and_random_operations(target: str) -> None:
    checks.check_mixed_lengths(make(), target)
    checks.check_random_operations(make(), target)


def test_formats() -> None:
    checks.check_formats(make())


def test_passes_fire_as_often_as_expected() -> None:
    checks.check_rewrites(make())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_of_transformers(shape: str, tmp_path: Path) -> None:
    checks.check_folder(make(shape), tmp_path / "tiny")


def test_a_window_that_is_not_said_is_transformers_own() -> None:
    """The first Mistral's window stands in its file, later ones say null, and some nothing."""
    values = twin_of(make().config).config.to_dict() | {"max_position_embeddings": 8192}
    for window, expected in ((None, ()), (64, (64, 64)), (8192, ())):
        found = config_of_hf({**values, "sliding_window": window}, where="tiny")
        assert found.windows == expected
    del values["sliding_window"]
    assert config_of_hf(values, where="tiny").windows == (4096, 4096)
