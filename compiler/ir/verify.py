"""A graph's invariants after each stage. A failed assertion is an internal error.

:func:`check_model` rejects unsupported user modules with a user error after matching.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import COMPUTE, CONSTANT, STATE, WEIGHT, info, product_info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import operator_name
from tilewright.compiler.ops import OPERATORS
from tilewright.errors import CompileError

aten = torch.ops.aten

STRUCTURAL = {
    operator.getitem,
    aten.add.Tensor,
    aten.unflatten.int,
    aten.flatten.using_ints,
    aten.split_with_sizes.default,
    aten.index_select.default,
}
"""Ops allowed in matched graphs in addition to Tilewright's: adds and shape changes."""

ELEMENTWISE = {aten.mul.Tensor, aten.div.Tensor, aten.tanh.default}
"""Other allowed arithmetic: scaled embeddings, gates, capped logits."""

STATEFUL = (ops.attention, ops.causal_conv1d, ops.gated_delta_rule)
"""Ops in models without explicit state. `insert_state` replaces them."""

BESIDE_OURS = STRUCTURAL | ELEMENTWISE
"""All allowed ops outside Tilewright's op set."""


def check_model(graph_module: GraphModule) -> None:
    """Reject a module with unsupported operations.

    Raises:
        CompileError: A call has no operator, plain arithmetic reads a parameter (for example a bias
            outside its linear layer), or the result is not logits.
    """
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        where = info(node).fqn or node.name
        if node.target not in OPERATORS and node.target not in BESIDE_OURS:
            raise CompileError(
                f"{where}: calls {node.target}, not an operator; allowed: "
                "tilewright.compiler.ops, and the operators of the architectures in models/"
            )
        parameter = next((each for each in node.all_input_nodes if info(each).role == WEIGHT), None)
        if parameter is not None and node.target in BESIDE_OURS:
            raise CompileError(
                f"{where}: {operator_name(node)} reads parameter {info(parameter).fqn!r}; allowed: "
                "a bias inside its linear layer, a weight inside its norm"
            )
    head, _ = head_of(graph_module)
    if head is None:
        raise CompileError(
            "the model's result is not that of a linear layer; allowed: logits, with arithmetic "
            "between them and numbers"
        )


def head_of(graph_module: GraphModule) -> tuple[Node | None, list[Node]]:
    """Return the linear for the logits, and the elementwise operations after it, last first.

    Return None for the linear if the result comes from another operation.
    """
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    head, after = output.args[0], []
    by_value = {*ELEMENTWISE, ops.all_gather.overload}
    while isinstance(head, Node) and head.target in by_value and len(head.all_input_nodes) == 1:
        after.append(head)
        head = head.all_input_nodes[0]
    is_product = isinstance(head, Node) and head.target is ops.linear.overload
    return (head if is_product else None), after


def verify_matched(graph_module: GraphModule) -> None:
    """Check that a graph contains only Tilewright's ops and structural nodes."""
    left = [
        str(node.target)
        for node in graph_module.graph.nodes
        if node.op == "call_function"
        and node.target not in OPERATORS
        and node.target not in BESIDE_OURS
    ]
    assert not left, f"no op of ours stands for: {', '.join(sorted(set(left)))}"


def verify_precision(graph_module: GraphModule) -> None:
    """Check that each weight has a format, and each matmul and attention has fidelities."""
    verify_matched(graph_module)
    for node in graph_module.graph.nodes:
        facts = info(node)
        if facts.role in (WEIGHT, CONSTANT):
            assert facts.recipe is not None and facts.recipe.format, f"{facts.fqn}: no format"
    experts = ops.expert_linear, ops.fused_expert_linear
    with_compute = ops.linear, ops.fused_linear, *experts, ops.attention
    for node in find_calls(graph_module.graph, *with_compute):
        assert info(node).compute is not None, f"{info(node).fqn}: no fidelity"
    for node in find_calls(graph_module.graph, ops.experts):
        for weight in node.args[2:5]:
            assert isinstance(weight, Node)
            assert product_info(node, weight).compute, f"{info(weight).fqn}: no fidelity"


def verify_sharded(graph_module: GraphModule) -> None:
    """Check a graph's shardings.

    Operands of elementwise operators have equal shardings. Only collectives, sums and scalings read
    partial values. The result is whole.
    """
    verify_precision(graph_module)
    scale = {aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, ops.sigmoid_gate.overload}
    for node in graph_module.graph.nodes:
        places = [info(each).placement for each in node.all_input_nodes]
        found = [place for place in places if place is not None]
        if any(place.partial for place in found):
            assert node.target in scale | ops.COLLECTIVES, f"{node.name} reads a partial value"
        if node.target in ELEMENTWISE or node.target is ops.swiglu.overload:
            wide = [place.sharded for place in found if not place.partial and place.sharded]
            assert len(set(wide)) <= 1, f"{node.name}: operands lie apart"
        if node.op == "output":
            assert all(not place.sharded and not place.partial for place in found), (
                "a part comes out"
            )


def verify_lowered(graph_module: GraphModule) -> None:
    """Check that state is explicit and recipes match the shapes in the graph."""
    left = find_calls(graph_module.graph, *STATEFUL)
    assert not left, f"{', '.join(map(operator_name, left))} without state is left"
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            _verify_input(node)
        elif node.op == "call_function":
            assert "val" in node.meta, f"{node.name}: no shape"
            assert info(node).role == COMPUTE


def _verify_input(node: Node) -> None:
    facts = info(node)
    if facts.role in (WEIGHT, CONSTANT):
        assert facts.recipe is not None
        rows = facts.recipe.shape[0] + facts.recipe.pad_rows
        expected = (rows, *facts.recipe.shape[1:])
        actual = tuple(node.meta["val"].shape)
        assert actual == expected, f"{facts.fqn}: recipe {expected}, graph {actual}"
        stacked = sum(segment.num_rows for segment in facts.recipe.segments)
        assert stacked == facts.recipe.num_rows, f"{facts.fqn}: segments do not add up"
        if facts.recipe.columns is not None:
            width = sum(run.count for run in facts.recipe.columns)
            assert width == facts.recipe.shape[-1], f"{facts.fqn}: columns do not add up"
    elif facts.role == STATE:
        assert facts.state is not None, f"{facts.fqn}: state without a StateSpec"
