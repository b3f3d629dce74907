"""Fuses the weighted sum over experts with the shared expert and the residual add."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass

_ADD = torch.ops.aten.add.Tensor
_PRODUCTS = (ops.expert_linear.overload, ops.fused_expert_linear.overload)


@graph_pass
def fuse_expert_sum(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse an add with a sum over experts, if it is the sum's only reader. Return the number of
    adds.

    The fused op retains the sum's metadata.
    """
    count = 0
    for total in find_calls(graph_module.graph, _ADD):
        fused = _with_shared(total) or _with_residual(total)
        if fused is not None:
            product, args = fused
            replace(
                total, emit(total, ops.fused_expert_linear, args.arguments(), facts=info(product))
            )
            graph_module.graph.erase_node(product)
            count += 1
    return count


_Fused = tuple[Node, ops.FusedExpertArguments] | None


def _with_shared(total: Node) -> _Fused:
    """Match the sum of experts and a shared expert with a gate per token."""
    for product, other in _operands(total):
        args = _sum_of(product)
        if args is None or args.shared is not None or args.residual is not None:
            continue
        if other.target is not ops.sigmoid_gate.overload or len(other.users) > 1:
            continue
        shared, gate = other.args
        assert isinstance(gate, Node)
        if int(gate.meta["val"].shape[-1]) == 1:
            return product, args._replace(shared=shared, shared_gate=gate)
    return None


def _with_residual(total: Node) -> _Fused:
    for product, residual in _operands(total):
        args = _sum_of(product)
        if args is not None and args.residual is None:
            return product, args._replace(residual=residual)
    return None


def _operands(total: Node) -> list[tuple[Node, Node]]:
    """Return both orders of an add's operands if their types and shapes are equal."""
    left, right = total.args
    if total.kwargs or not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return []
    types = [(each.meta["val"].dtype, tuple(each.meta["val"].shape)) for each in (left, right)]
    return [(right, left), (left, right)] if types[0] == types[1] else []


def _sum_of(node: Node) -> ops.FusedExpertArguments | None:
    """Return an expert matmul's arguments with a weighted sum and a single reader."""
    if node.target not in _PRODUCTS or len(node.users) > 1:
        return None
    args = ops.FusedExpertArguments.of(node.args)
    return args if args.weights is not None else None
