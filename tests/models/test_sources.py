"""Parameters that are rows of a checkpoint's tensors, or kept with an offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.tiny import tiny_model
from tilewright.compiler.driver import trace_model, weight_source
from tilewright.compiler.formats.block_float import BFP8
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import Segment, WeightRecipe, load_dense, load_values
from tilewright.errors import CheckpointError
from tilewright.models.sources import Sources, TensorSource, cut_rows, stored_shapes


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(2, 3))
        self.two = nn.Parameter(torch.empty(4, 3))
        self.norm = nn.Parameter(torch.empty(3))
        self.tied = self.norm

    def sources(self) -> Sources:
        return {
            "one": (TensorSource("both", (0, 2)),),
            "two": (TensorSource("both", (2, 6)),),
            "norm": (TensorSource("norm", offset=1.0),),
        }


def test_shapes_are_those_of_the_stored_tensors() -> None:
    assert stored_shapes(Fused()) == {"both": (6, 3), "norm": (3,)}
    llama = tiny_model().module
    own = {name: tuple(weight.shape) for name, weight in llama.named_parameters()}
    assert llama.sources() == {} and stored_shapes(llama) == own


def test_rows_and_offsets_are_loaded() -> None:
    stored = torch.arange(18.0).view(6, 3)
    recipe = WeightRecipe((Segment("both", 4, rows=(2, 6), offset=0.5),), (4, 3))
    values = load_dense(recipe, {"both": stored}.__getitem__)
    assert torch.equal(values, stored[2:] + 0.5)
    values.zero_()
    assert stored[2:].any(), "what is kept is not what is handed out"


class Stacked(nn.Module):
    """Two experts of two rows each: stacked in one tensor with others, or in one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2, 2, 3))
        self.down = nn.Parameter(torch.empty(2, 3, 2))

    def sources(self) -> Sources:
        return {
            "gate": cut_rows("both", [(0, 2), (4, 6)], (2, 4, 3)),
            "down": (TensorSource("down.0"), TensorSource("down.1")),
        }


def test_shapes_of_stacks_and_of_tensors_that_are_stacked() -> None:
    assert stored_shapes(Stacked()) == {"both": (2, 4, 3), "down.0": (3, 2), "down.1": (3, 2)}


def test_stacks_are_loaded_row_by_row() -> None:
    both = torch.arange(24.0).view(2, 4, 3)
    segments = tuple(Segment("both", 2, rows=rows) for rows in ((0, 2), (4, 6)))
    recipe = WeightRecipe(segments, (2, 2, 3))
    assert recipe.num_rows == 4
    assert torch.equal(load_dense(recipe, {"both": both}.__getitem__), both[:, :2])
    parts = {f"down.{index}": torch.randn(3, 2) for index in range(2)}
    recipe = WeightRecipe(tuple(Segment(name, 3) for name in parts), (2, 3, 2), "bfp8")
    expected = torch.stack(list(parts.values()))
    assert torch.equal(load_dense(recipe, parts.__getitem__), expected)
    for axis, dim in (("in", -1), ("out", -2)):
        values = load_values(recipe.with_format("bfp8", axis), parts.__getitem__)
        each = [BFP8.round_trip(part, axis=dim) for part in expected]
        assert torch.equal(values, torch.stack(each)), "experts share no blocks"


def test_a_stack_of_another_shape_is_named() -> None:
    recipe = WeightRecipe((Segment("down.0", 3), Segment("down.1", 3)), (2, 3, 2))
    parts = {"down.0": torch.ones(3, 2), "down.1": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match=r"'down\.1' has shape \[2, 2\]; allowed: \[3, 2\]"):
        load_dense(recipe, parts.__getitem__)


def test_the_trace_knows_every_part() -> None:
    model = make_hybrid()
    graph_module = trace_model(model)
    weights = {info(node).fqn: info(node).recipe for node in graph_module.graph.nodes}
    gate = weights["model.layers.0.mlp.experts.gate_proj.weight"]
    assert gate is not None and gate.shape == (6, 24, 32)
    assert [each.rows for each in gate.segments[:2]] == [(0, 24), (48, 72)]
    query = weights["model.layers.3.self_attn.q_proj.weight"]
    assert query is not None
    assert [each.rows for each in query.segments] == [(0, 32), (64, 96)], "head by head"
    assert {each.name for each in query.segments} == {"model.layers.3.self_attn.q_proj.weight"}


def test_only_the_last_shared_tensor_is_kept() -> None:
    model = tiny_model(model_type="phi3")
    get, reads = weight_source(model), model.checkpoint.reads
    names = [f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in (0, 0, 1, 1, 0)]
    found: list[Any] = [get(name) for name in names]
    assert reads == [names[0], names[2], names[4]]
    assert found[0] is found[1] and found[2] is found[3]
    get("model.norm.weight")
    assert get("model.norm.weight") is not None and reads[-2:] == ["model.norm.weight"] * 2
