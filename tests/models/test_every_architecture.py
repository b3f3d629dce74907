"""Checks of every architecture: logits on the targets, folders, passes, refused configurations.

``tests/models/test_<model_type>.py`` has its tiny models, ``make`` and ``SHAPES``, the changes that
are refused, ``NOT_READ``, and the tests of its own parts.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests import architecture_checks as checks
from tests.twins import assert_eager_equals_twin, twin_of
from tilewright.errors import CheckpointError
from tilewright.models.architectures.table import model_types
from tilewright.models.checkpoints.huggingface.config import config_of_hf

_FOUND = {name: importlib.import_module(f"tests.models.test_{name}") for name in model_types()}
MODULES: dict[str, Any] = {
    name: module for name, module in _FOUND.items() if hasattr(module, "SHAPES")
}
SHAPES = [(name, shape) for name, module in MODULES.items() for shape in module.SHAPES]

_NATIVE = ("reference", "cpu-native")
TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("glm4_moe", "gpt_oss", "minimax_m2"), _NATIVE),
    **dict.fromkeys(("gemma3_text", "mistral", "mllama", "phi3"), checks.TARGETS),
    **dict.fromkeys(("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"), checks.TARGETS),
    "qwen3_next": ("reference",),
}
"""Targets of the logits. Others: `checks.EVERY_TARGET`. The native tests have further models."""

MIXED: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemma3_text": ("grouped", checks.TARGETS),
    "glm4_moe": ("air", _NATIVE),
    "gpt_oss": ("alternating", _NATIVE),
    "lfm2": ("as_published", checks.EVERY_TARGET),
    "mistral": ("window", checks.TARGETS),
    "phi3": ("long", checks.TARGETS),
    "qwen3": ("grouped", checks.TARGETS),
    "qwen3_5": ("other_sizes", ("reference",)),
    "qwen3_5_moe": ("as_published", ("cpu",)),
    "qwen3_moe": ("sparse", ("cpu",)),
}
RANDOM: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemma3_text": ("scaled_and_capped", ("cpu",)),
    "lfm2": ("as_published", _NATIVE),
    "mistral": ("window", checks.TARGETS),
    "phi3": ("partial_long", ("cpu",)),
    "qwen3": ("windows", ("cpu",)),
    "qwen3_5": ("as_published", ("reference",)),
    "qwen3_5_moe": ("as_published", ("cpu",)),
    "qwen3_moe": ("sparse", ("cpu",)),
}
FORMATS = {
    **{"gemma3_text": ("grouped",), "mistral": ("window",), "phi3": ("short",)},
    **{"qwen3": ("grouped",), "qwen3_5_moe": ("unequal_sizes",)},
    "qwen3_moe": tuple(MODULES["qwen3_moe"].SHAPES),
}
REWRITES = {"gemma3_text": ("grouped", "scaled_and_capped"), "qwen3_next": ("with_a_dense_layer",)}
"""Shapes with expected rewrites. Others: the first."""


@functools.cache
def model_of(name: str, shape: str) -> Any:
    return MODULES[name].make(shape)


def _by_target(table: dict[str, tuple[str, tuple[str, ...]]]) -> list[tuple[str, str, str]]:
    return [(name, shape, each) for name, (shape, targets) in table.items() for each in targets]


@pytest.mark.parametrize(
    ("name", "shape"), [each for each in SHAPES if each[0] not in ("mllama", "phi3")]
)
def test_eager_logits_and_names_are_transformers(name: str, shape: str) -> None:
    assert_eager_equals_twin(model_of(name, shape))


@pytest.mark.parametrize(("name", "shape"), [each for each in SHAPES if each[0] != "muse_glimmer"])
def test_a_folder_of_transformers(name: str, shape: str, tmp_path: Path) -> None:
    checks.check_folder(model_of(name, shape), tmp_path / "tiny")


@pytest.mark.parametrize(
    ("name", "shape", "target"),
    [(*each, t) for each in SHAPES for t in TARGETS.get(each[0], checks.EVERY_TARGET)],
)
def test_logits_on_every_target(name: str, shape: str, target: str) -> None:
    checks.check_logits(model_of(name, shape), target)


@pytest.mark.parametrize(("name", "shape", "target"), _by_target(MIXED))
def test_sequences_together_and_apart(name: str, shape: str, target: str) -> None:
    checks.check_mixed_lengths(model_of(name, shape), target)


@pytest.mark.parametrize(("name", "shape", "target"), _by_target(RANDOM))
def test_random_operations(name: str, shape: str, target: str) -> None:
    checks.check_random_operations(model_of(name, shape), target)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_snapshots_on_the_reference(name: str) -> None:
    checks.check_snapshots(model_of(name, "as_published"), "reference")


@pytest.mark.parametrize(("name", "shapes"), FORMATS.items())
def test_formats(name: str, shapes: tuple[str, ...]) -> None:
    for shape in shapes:
        checks.check_formats(model_of(name, shape))


@pytest.mark.parametrize("name", MODULES)
def test_passes_fire_as_often_as_expected(name: str) -> None:
    for shape in REWRITES.get(name, tuple(MODULES[name].SHAPES)[:1]):
        checks.check_rewrites(model_of(name, shape))


@pytest.mark.parametrize(
    "name", [n for n, module in MODULES.items() if hasattr(module, "NOT_READ")]
)
def test_what_is_not_read(name: str) -> None:
    values = twin_of(next(map(MODULES[name].make, MODULES[name].SHAPES)).config).config.to_dict()
    for changes, words in MODULES[name].NOT_READ:
        with pytest.raises(CheckpointError, match=words) as caught:
            config_of_hf(values | changes, where="config.json")
        assert "\n" not in str(caught.value), changes
