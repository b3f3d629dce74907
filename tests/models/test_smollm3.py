"""SmolLM3: layers without a rotation, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin, assert_eager_equals_twin, twin_of
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.huggingface.config import config_of_hf

ON_CUDA: dict[str, Any] = {"num_layers": 2, "second_layers": (1,)}
SHAPES: dict[str, dict[str, Any]] = {
    "still": {"num_layers": 3, "second_layers": (0, 2)},
    "windowed": {"second_layers": (1,), "windows": (0, 5), "tie_embeddings": False},
}


def _changes(config: Any) -> dict[str, Any]:
    layers = range(config.num_layers)
    rotates = [int(layer not in config.second_layers) for layer in layers]
    changes: dict[str, Any] = {"no_rope_layers": rotates, "pad_token_id": 0, "mlp_bias": False}
    if config.windows:
        changes |= {"use_sliding_window": True, "sliding_window": max(config.windows)}
    return changes


TWIN = Twin(transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, _changes)


def make(shape: str = "still") -> Any:
    return tiny_model(std=0.2, model_type="smollm3", **SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
def test_eager_logits_and_names_are_transformers(shape: str, tmp_path: Path) -> None:
    assert_eager_equals_twin(make(shape))
    checks.check_folder(make(shape), tmp_path / "tiny")


@pytest.mark.parametrize("target", checks.EVERY_TARGET)
def test_logits_on_every_target(target: str) -> None:
    for shape in SHAPES:
        checks.check_logits(make(shape), target)


def test_passes_fire_as_often_as_expected() -> None:
    checks.check_rewrites(make())


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    model = tiny_model(model_type="smollm3", num_layers=8, second_layers=(3, 7))
    checks.check_gguf(
        model,
        tmp_path / "tiny.gguf",
        architecture=gguf.MODEL_ARCH.SMOLLM3,
        extra=lambda writer: None,
        adjacent=True,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_rope_layers": [1]}, r"no_rope_layers = \[1\].*a list of 3 of 0, 1"),
        ({"no_rope_layers": [1, 2, 1]}, "no_rope_layers = .*a list of 3 of 0, 1"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ({"layer_types": ["conv"] * 3}, "layer_types = 'conv'"),
    ],
)
def test_what_is_not_read(changes: dict[str, Any], words: str) -> None:
    values = twin_of(make().config).config.to_dict() | changes
    with pytest.raises(CheckpointError, match=words):
        config_of_hf(values, where="config.json")
