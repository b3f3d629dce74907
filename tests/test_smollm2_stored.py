"""The default model's file, Q4_1 with a Q8_0 table, as precision ``stored`` holds it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.ggml_blocks import file_values
from tilewright.compiler.driver import lower_model, resolve_precision, weight_source
from tilewright.compiler.ir.recipe import load_values
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.contract.weight_storage import weight_uses
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.models import load_model, quantised_types

pytestmark = pytest.mark.weights


def test_every_weight_is_the_file_s_bit_for_bit(smollm2_path: Path) -> None:
    """Merged products included; nothing is quantised again."""
    assert quantised_types(smollm2_path) == ("Q4_1", "Q8_0")
    model = load_model(smollm2_path)
    resolved = resolve_precision(model, load_precision("stored"))
    graph_module, ctx = lower_model(model, resolved, get_target("cpu").stages(), silent)
    uses = weight_uses(graph_module)
    recipes = [use.recipe for use in uses if use.facts.tensor_group is not None]
    assert ctx.notes == [] and all(recipe.is_stored for recipe in recipes)
    found = Counter(recipe.format for recipe in recipes for _ in recipe.segments)
    assert found == {"q41": 7 * model.config.num_layers, "q80": 2}
    source = weight_source(model)
    for recipe in recipes[:9]:
        assert torch.equal(load_values(recipe, source), file_values(model, recipe.names))
