"""Fuses a linear with the residual add after it."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass

_PRODUCTS = (ops.linear.overload, ops.fused_linear.overload)


@graph_pass
def fuse_linear_residual(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse an add with a linear, if it is the linear's only reader. Return the add count.

    The fused op retains the linear's metadata. If both operands are linears, the second is fused.
    """
    count = 0
    for total in find_calls(graph_module.graph, torch.ops.aten.add.Tensor):
        found = _product_and_residual(total)
        if found is None:
            continue
        product, residual = found
        args = ops.FusedArguments.of(product.args)._replace(residual=residual)
        replace(total, emit(total, ops.fused_linear, args, facts=info(product)))
        graph_module.graph.erase_node(product)
        count += 1
    return count


def _product_and_residual(total: Node) -> tuple[Node, Node] | None:
    """Return an add's operands, a fusible linear first, if their types and shapes are equal."""
    left, right = total.args
    if total.kwargs or not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return None
    types = [(each.meta["val"].dtype, tuple(each.meta["val"].shape)) for each in (left, right)]
    if types[0] != types[1]:
        return None
    for product, residual in ((right, left), (left, right)):
        if _takes_a_residual(product):
            return product, residual
    return None


def _takes_a_residual(node: Node) -> bool:
    if node.target not in _PRODUCTS or len(node.users) > 1:
        return False
    args = ops.FusedArguments.of(node.args)
    return args.residual is None and not args.swiglu
