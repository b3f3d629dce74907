"""Every assertion of the verifiers fails on a graph that is wrong in that one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from tests.tiny import lowered, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import STATE, info, set_info
from tilewright.compiler.ir.recipe import Segment
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.verify import verify_lowered, verify_matched, verify_precision

Change = Callable[[GraphModule], object]


@pytest.fixture
def graph_module() -> GraphModule:
    return lowered(tiny_model(num_layers=1))[0]


def weight_of(graph_module: GraphModule, name: str) -> Node:
    return next(n for n in graph_module.graph.nodes if info(n).fqn == name)


def first(graph_module: GraphModule, operator: ops.Operator) -> Node:
    return find_calls(graph_module.graph, operator)[0]


def leave_a_foreign_node(graph_module: GraphModule) -> None:
    first(graph_module, ops.linear).target = torch.ops.aten.linear.default


def drop_a_format(graph_module: GraphModule) -> None:
    node = weight_of(graph_module, "model.norm.weight")
    recipe = info(node).recipe
    assert recipe is not None
    set_info(node, recipe=dataclasses.replace(recipe, format=None))


def drop_a_recipe(graph_module: GraphModule) -> None:
    set_info(weight_of(graph_module, "model.norm.weight"), recipe=None)


def drop_a_fidelity(graph_module: GraphModule) -> None:
    set_info(first(graph_module, ops.linear), compute=None)


def leave_stateless_attention(graph_module: GraphModule) -> None:
    first(graph_module, ops.rope_attention_step).target = ops.attention.overload


def drop_a_shape(graph_module: GraphModule) -> None:
    del first(graph_module, ops.linear).meta["val"]


def call_a_node_a_state(graph_module: GraphModule) -> None:
    set_info(first(graph_module, ops.linear), role=STATE)


def reshape_a_recipe(graph_module: GraphModule) -> None:
    node = weight_of(graph_module, "model.norm.weight")
    recipe = info(node).recipe
    assert recipe is not None
    set_info(node, recipe=dataclasses.replace(recipe, shape=(33,)))


def pad_a_recipe(graph_module: GraphModule) -> None:
    node = weight_of(graph_module, "model.norm.weight")
    recipe = info(node).recipe
    assert recipe is not None
    set_info(node, recipe=dataclasses.replace(recipe, pad_rows=1))


def lose_a_segment(graph_module: GraphModule) -> None:
    node = weight_of(graph_module, "model.norm.weight")
    recipe = info(node).recipe
    assert recipe is not None
    set_info(node, recipe=dataclasses.replace(recipe, segments=(Segment("n", 31),)))


def forget_the_state(graph_module: GraphModule) -> None:
    set_info(weight_of(graph_module, "model.layers.0.self_attn.kv"), state=None)


def test_a_good_graph_passes_every_verification(graph_module: GraphModule) -> None:
    verify_matched(graph_module)
    verify_precision(graph_module)
    verify_lowered(graph_module)


@pytest.mark.parametrize(
    ("verify", "change", "message"),
    [
        (verify_matched, leave_a_foreign_node, "no op of ours stands for: aten.linear.default"),
        (verify_precision, leave_a_foreign_node, "aten.linear.default"),
        (verify_precision, drop_a_format, "model.norm.weight: no format"),
        (verify_precision, drop_a_recipe, "model.norm.weight: no format"),
        (verify_precision, drop_a_fidelity, "no fidelity"),
        (verify_lowered, leave_stateless_attention, "attention without state"),
        (verify_lowered, drop_a_shape, "no shape"),
        (verify_lowered, call_a_node_a_state, None),
        (verify_lowered, drop_a_recipe, None),
        (verify_lowered, reshape_a_recipe, r"model.norm.weight: recipe \(33,\), graph \(32,\)"),
        (verify_lowered, pad_a_recipe, r"model.norm.weight: recipe \(33,\), graph \(32,\)"),
        (verify_lowered, lose_a_segment, "model.norm.weight: segments do not add up"),
        (verify_lowered, forget_the_state, "model.layers.0.self_attn.kv: state without"),
    ],
)
def test_a_wrong_graph_is_refused(
    graph_module: GraphModule,
    verify: Callable[[GraphModule], None],
    change: Change,
    message: str | None,
) -> None:
    change(graph_module)
    with pytest.raises(AssertionError, match=message):
        verify(graph_module)
