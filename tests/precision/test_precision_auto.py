"""What ``auto`` stands for, by what a checkpoint is stored in and the target."""

from __future__ import annotations

import pytest

from tilewright.compiler.formats import STORED_NAMES, get_format
from tilewright.compiler.ir.info import Compute, NodeInfo
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.precision import choose_precision, load_precision
from tilewright.compiler.precision.auto import HOLDS_STORED, SMALL, SMALL_BYTES
from tilewright.compiler.targets.table import get_target, target_names

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
    assert small == (SMALL if target == "cpu-native" else name) and f"auto: {small}, " in why
    assert load_precision(small).resolve(2).format("ff2") == load_precision(name).resolve(2).format(
        "ff2"
    )
    load_precision(name)


@pytest.mark.parametrize("target", HOLDS_STORED)
@pytest.mark.parametrize("name", QUANTISED)
def test_targets_that_hold_stored_weights_hold_every_format(target: str, name: str) -> None:
    recipe = WeightRecipe((Segment("w", 64),), (64, 256)).as_stored(name)
    facts = NodeInfo(tensor_group="ff2", compute=Compute("hifi2", "hifi2"))
    assert get_target(target).holding(recipe, facts, compute="fast").kind
