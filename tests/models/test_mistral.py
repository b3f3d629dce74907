"""Mistral: a window in every layer, on every target, and from a folder."""

from __future__ import annotations

from typing import Any

from tests.tiny import tiny_model
from tests.twins import twin_of
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


def test_a_window_that_is_not_said_is_transformers_own() -> None:
    """The first Mistral's window stands in its file, later ones say null, and some nothing."""
    values = twin_of(make().config).config.to_dict() | {"max_position_embeddings": 8192}
    for window, expected in ((None, ()), (64, (64, 64)), (8192, ())):
        found = config_of_hf({**values, "sliding_window": window}, where="tiny")
        assert found.windows == expected
    del values["sliding_window"]
    assert config_of_hf(values, where="tiny").windows == (4096, 4096)
