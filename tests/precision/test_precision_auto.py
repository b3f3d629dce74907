"""What ``auto`` stands for, by what a checkpoint is stored in and the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ggml_blocks import SHAPES, write_llama
from tilewright.cli.commands.compile import _resolved
from tilewright.compiler.formats import STORED_NAMES, get_format
from tilewright.compiler.ir.info import Compute, NodeInfo
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.precision import choose_precision, load_precision
from tilewright.compiler.precision.auto import HOLDS_STORED, SMALL, SMALL_BYTES
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target, target_names
from tilewright.loading.program import settle_backend
from tilewright.options.default_precision import default_precision
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import resolve

QUANTISED = [name for name in STORED_NAMES if get_format(name).block > 1]


@pytest.mark.parametrize("target", target_names())
def test_the_choice_and_why(target: str) -> None:
    types = ("Q4_1", "Q8_0")
    name, why = choose_precision(types, target)
    assert name == ("stored" if target in HOLDS_STORED else "accuracy")
    assert "Q4_1, Q8_0" in why and f"auto: {name}, " in why and "\n" not in why
    assert choose_precision((), target)[0] == "accuracy"
    assert choose_precision(types, target, SMALL_BYTES) == (name, why)
    small, why = choose_precision(types, target, SMALL_BYTES - 1)
    assert small == SMALL.get(target, name) and f"auto: {small}, " in why
    assert load_precision(small).resolve(2).format("ff2") == load_precision(name).resolve(2).format(
        "ff2"
    )
    load_precision(name)


@pytest.mark.parametrize("target", HOLDS_STORED)
@pytest.mark.parametrize("name", QUANTISED)
def test_targets_that_hold_stored_weights_hold_every_format(target: str, name: str) -> None:
    recipe = WeightRecipe((Segment("w", 64),), (64, 256)).as_stored(name)
    facts = NodeInfo(tensor_group="ff2", compute=Compute("hifi2", "hifi2"))
    assert get_target(target).weight_storage(recipe, facts, compute="fast").kind


def test_a_small_file_has_another_configuration_for_onnxruntime(tmp_path: Path) -> None:
    """Which has one arithmetic for both phases; the size is that of all parts of a file."""
    model = write_llama(tmp_path / "tiny.gguf", dict.fromkeys(SHAPES, "Q4_0"), embedding="Q8_0")
    first, other = default_precision(model, ("Q4_0", "Q8_0"), "cpu", is_auto=True)
    assert other is not None
    assert (first.precision.name, other.precision.name) == (SMALL["cpu-native"], SMALL["cpu"])
    assert default_precision(model, ("Q4_0", "Q8_0"), "cpu", is_auto=False)[0] == other
    split = model.rename(tmp_path / "tiny-00001-of-00002.gguf")
    for name in ("tiny-chat-00001-of-00002", "tiny-00003-of-00003"):  # of other models
        with (tmp_path / f"{name}.gguf").open("wb") as rest:
            rest.truncate(SMALL_BYTES)  # a sparse file
    found, _ = default_precision(split, ("Q4_0", "Q8_0"), "cpu", is_auto=True)
    assert found.precision.name == SMALL["cpu-native"]
    with (tmp_path / "tiny-00002-of-00002.gguf").open("wb") as rest:
        rest.truncate(SMALL_BYTES)
    large, other = default_precision(split, ("Q4_0", "Q8_0"), "cpu", is_auto=True)
    assert (large.precision.name, other) == ("stored", None)


def test_settling_on_onnxruntime_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_llama(tmp_path / "tiny.gguf", dict.fromkeys(SHAPES, "Q4_0"), embedding="Q8_0")
    options = resolve(EngineConfig(model=str(model)))
    monkeypatch.setattr(
        "tilewright.compiler.targets.cpu.backend.choose_backend",
        lambda progress: ("cpu", "backend auto: onnxruntime, for this test"),
    )
    settled = settle_backend(options, silent)
    assert settled.precision == load_precision(SMALL["cpu"])
    assert [each.split(",")[0] for each in settled.notes] == [
        f"precision auto: {SMALL['cpu']}",
        "backend auto: onnxruntime",
    ]


def test_compile_to_onnx_takes_the_configuration_of_onnxruntime(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf", dict.fromkeys(SHAPES, "Q4_0"), embedding="Q8_0")
    for emit, target in (("onnx", "cpu"), ("program", "cpu-native")):
        options = _resolved(emit, EngineConfig(model=str(model)))
        assert options.precision == load_precision(SMALL[target])
