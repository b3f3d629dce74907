"""Patterns against small hand-made graphs, and what emit, replace and inputs leave behind."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tilewright.compiler import ops
from tilewright.compiler.ir.info import CONSTANT, INPUT, NodeInfo, info
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    add_input,
    emit,
    fake_input,
    find_calls,
    match,
    replace,
    rewrite_matches,
)

aten = torch.ops.aten
MUL, ADD = aten.mul.Tensor, aten.add.Tensor


class Builder:
    """A graph with inputs a, b, c of shape [5, 4] whose nodes carry fakes."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.a, self.b, self.c = (self.input(name, (5, 4)) for name in "abc")

    def input(self, name: str, shape: tuple[int, ...]) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(torch.empty(shape, device="meta"))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)


@pytest.fixture
def g() -> Builder:
    return Builder()


def test_a_call_binds_its_variables(g: Builder) -> None:
    node = g.call(MUL, g.a, g.call(aten.silu.default, g.b))
    pattern = CallPattern(MUL, Var("x"), CallPattern(aten.silu.default, Var("y")))
    assert match(pattern, node) == {"x": g.a, "y": g.b}


def test_another_operator_or_too_few_arguments_do_not_match(g: Builder) -> None:
    node = g.call(MUL, g.a, g.b)
    assert match(CallPattern(ADD, Var("x"), Var("y")), node) is None
    assert match(CallPattern(MUL, Var("x"), Var("y"), Var("z")), node) is None
    assert match(CallPattern(MUL, Var("x"), Var("y")), g.a) is None
    assert match(CallPattern((ADD, MUL), Var("x"), Var("y")), node) is not None


def test_trailing_arguments_are_free(g: Builder) -> None:
    node = g.call(aten.cat.default, [g.a, g.b], -1)
    assert match(CallPattern(aten.cat.default, [Var("x"), Var("y")]), node) == {"x": g.a, "y": g.b}
    assert match(CallPattern(aten.cat.default, [Var("x"), Var("y")], 0), node) is None
    assert match(CallPattern(aten.cat.default, [Var("x")]), node) is None


def test_keyword_arguments_are_never_ignored(g: Builder) -> None:
    """``add(a, b, alpha=2)`` is not an addition of a and b."""
    assert match(CallPattern(ADD, Var("x"), Var("y")), g.call(ADD, g.a, g.b, alpha=2)) is None


def test_a_repeated_variable_is_one_node(g: Builder) -> None:
    pattern = CallPattern(MUL, Var("x"), CallPattern(aten.silu.default, Var("x")))
    assert match(pattern, g.call(MUL, g.a, g.call(aten.silu.default, g.a))) == {"x": g.a}
    assert match(pattern, g.call(MUL, g.a, g.call(aten.silu.default, g.b))) is None


def test_commutative_calls_match_both_ways(g: Builder) -> None:
    silu = g.call(aten.silu.default, g.a)
    flipped = g.call(MUL, g.b, silu)
    pattern = CallPattern(aten.silu.default, Var("x"))
    assert match(CallPattern(MUL, pattern, Var("y")), flipped) is None
    found = match(CallPattern(MUL, pattern, Var("y"), commutative=True), flipped)
    assert found == {"x": g.a, "y": g.b}
    assert (
        match(CallPattern(MUL, pattern, Var("y"), commutative=True), g.call(MUL, g.a, g.b)) is None
    )


def test_literals_bind_values_and_never_nodes(g: Builder) -> None:
    node = g.call(ADD, g.a, 1e-5)
    assert match(CallPattern(ADD, Var("x"), LiteralPattern("eps")), node) == {"x": g.a, "eps": 1e-5}
    assert match(CallPattern(ADD, LiteralPattern("eps"), Var("x")), node) is None
    assert match(CallPattern(ADD, Var("x"), Var("eps")), node) is None
    sizes = g.call(aten.split_with_sizes.default, g.a, [2, 2], -1)
    pattern = CallPattern(aten.split_with_sizes.default, Var("x"), LiteralPattern("sizes"), -1)
    assert match(pattern, sizes) == {"x": g.a, "sizes": [2, 2]}


def test_a_repeated_literal_must_be_equal(g: Builder) -> None:
    pattern = CallPattern(
        ADD, CallPattern(ADD, Var("x"), LiteralPattern("eps")), LiteralPattern("eps")
    )
    assert match(pattern, g.call(ADD, g.call(ADD, g.a, 1.0), 1.0)) is not None
    assert match(pattern, g.call(ADD, g.call(ADD, g.a, 1.0), 2.0)) is None


def test_constants_are_of_the_same_type(g: Builder) -> None:
    assert match(CallPattern(ADD, Var("x"), 1), g.call(ADD, g.a, 1)) is not None
    assert match(CallPattern(ADD, Var("x"), 1), g.call(ADD, g.a, True)) is None
    assert match(CallPattern(ADD, Var("x"), 1), g.call(ADD, g.a, 1.0)) is None


def test_emit_knows_the_shape_of_its_result(g: Builder) -> None:
    end = g.graph.output(g.a)
    weight = g.input("w", (7, 4))
    facts = NodeInfo(fqn="here", layer=3)
    node = emit(end, ops.linear, (g.a, weight), facts=facts)
    assert tuple(node.meta["val"].shape) == (5, 7)
    assert node.target is ops.linear.overload
    assert info(node) == facts
    pair = emit(end, ops.add_rms_norm, (g.a, g.b, weight, 1e-5))
    assert [tuple(value.shape) for value in pair.meta["val"]] == [(5, 4), (5, 4)]
    second = emit(end, operator.getitem, (pair, 1))
    assert tuple(second.meta["val"].shape) == (5, 4)
    assert info(second) == NodeInfo()


def test_emit_inserts_before(g: Builder) -> None:
    late = g.call(MUL, g.a, g.b)
    g.graph.output(late)
    early = emit(late, aten.silu.default, (g.a,))
    order = list(g.graph.nodes)
    assert order.index(early) == order.index(late) - 1


def test_replace_moves_the_users(g: Builder) -> None:
    old = g.call(MUL, g.a, g.b)
    user = g.call(aten.silu.default, old)
    end = g.graph.output(user)
    new = emit(user, ADD, (g.a, g.b))
    replace(old, new)
    assert user.args == (new,)
    assert old not in g.graph.nodes
    assert end.args == (user,)


def test_rewrite_counts_and_leaves_what_build_refuses(g: Builder) -> None:
    first = g.call(MUL, g.call(aten.silu.default, g.a), g.b)
    second = g.call(MUL, g.call(aten.silu.default, g.a), g.c)
    total = g.call(ADD, first, second)
    g.graph.output(total)
    pattern = CallPattern(MUL, CallPattern(aten.silu.default, Var("gate")), Var("up"))

    def build(root: Node, found: Bindings) -> Node | None:
        return None if found["up"] is g.b else emit(root, ADD, (found["gate"], found["up"]))

    assert rewrite_matches(g.graph, pattern, build) == 1
    assert [node.target for node in total.all_input_nodes] == [MUL, ADD]


def test_find_calls_takes_operators_and_overloads(g: Builder) -> None:
    ours = g.call(ops.swiglu.overload, g.a, g.b)
    theirs = g.call(MUL, ours, g.b)
    g.graph.output(theirs)
    assert find_calls(g.graph, ops.swiglu) == [ours]
    assert find_calls(g.graph, ops.swiglu, MUL) == [ours, theirs]
    assert find_calls(g.graph, ADD) == []


def test_a_new_input_comes_last_and_is_dynamic_where_named(g: Builder) -> None:
    g.graph.output(g.call(MUL, g.a, g.b))
    fake = fake_input(g.a, ("rows", 2), torch.int64)
    node = add_input(g.graph, "rows", fake, NodeInfo(role=INPUT))
    placeholders = [n for n in g.graph.nodes if n.op == "placeholder"]
    assert placeholders[-1] is node
    assert info(node).role == INPUT
    rows, columns = node.meta["val"].shape
    assert isinstance(rows, torch.SymInt) and columns == 2
    assert node.meta["val"].dtype == torch.int64
    g.graph.lint()


def test_facts_are_frozen_and_replaced_whole(g: Builder) -> None:
    from tilewright.compiler.ir.info import set_info

    assert info(g.a) == NodeInfo()
    updated = set_info(g.a, NodeInfo(fqn="w"), role=CONSTANT)
    assert info(g.a) is updated
    assert (updated.fqn, updated.role) == ("w", CONSTANT)
    with pytest.raises(AttributeError):
        updated.fqn = "other"  # type: ignore[misc]


def test_equal_names_are_one_dynamic_dimension(g: Builder) -> None:
    """Those of every layer's state, for instance; torch forgets what it knows at each new one."""
    first, again, other = (fake_input(g.a, (name, 2), torch.int64) for name in ("n", "n", "m"))
    assert str(first.shape[0]) == str(again.shape[0]) != str(other.shape[0])
