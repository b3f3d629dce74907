"""Fuses an all-reduce with the residual add after it and the sum's norm."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass

_PRODUCTS = (
    *(ops.linear.overload, ops.fused_linear.overload),
    *(ops.expert_linear.overload, ops.fused_expert_linear.overload),
)


@graph_pass
def fuse_all_reduce_add(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse an `all_reduce`, its only reader (an add), and the sum's norm. Return the number of
    adds.

    The norm is fused if only matmuls read it.
    """
    count = 0
    for total in find_calls(graph_module.graph, torch.ops.aten.add.Tensor):
        found = _reduced_and_residual(total)
        if found is None:
            continue
        reduced, residual = found
        norm = _norm_of(total)
        x, ranks, wire = reduced.args
        weight, eps = (norm.args[1], norm.args[2]) if norm is not None else (None, 0.0)
        args = (x, residual, weight, eps, ranks, wire)
        both = emit(total, ops.all_reduce_add, args, facts=info(reduced))
        if norm is not None:
            replace(norm, emit(total, operator.getitem, (both, 0), facts=info(norm)))
        replace(total, emit(total, operator.getitem, (both, 1), facts=info(total)))
        graph_module.graph.erase_node(reduced)
        count += 1
    return count


def _reduced_and_residual(total: Node) -> tuple[Node, Node] | None:
    """Return an add's operands if their shapes are equal and the first has a single reader.

    The first is an all-reduce.
    """
    left, right = total.args
    if total.kwargs or not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return None
    if left.meta["val"].shape != right.meta["val"].shape:
        return None
    for reduced, residual in ((right, left), (left, right)):
        if reduced.target is ops.all_reduce.overload and len(reduced.users) == 1:
            return reduced, residual
    return None


def _norm_of(total: Node) -> Node | None:
    """Return the only norm of a sum if all its readers are matmuls without a norm, else None.

    A later pass would fuse other norms.
    """
    norms = [each for each in total.users if each.target is ops.rms_norm.overload]
    if len(norms) != 1 or norms[0].args[0] is not total or not norms[0].users:
        return None
    weight = norms[0].args[1]
    if not isinstance(weight, Node) or weight.op != "placeholder":  # maybe after the sum
        return None
    is_operand = all(_reads_as_it_is(reader, norms[0]) for reader in norms[0].users)
    return norms[0] if is_operand else None


def _reads_as_it_is(reader: Node, norm: Node) -> bool:
    if reader.target not in _PRODUCTS or reader.args[0] is not norm:
        return False
    is_once = all(each is not norm for each in reader.args[1:])
    is_normed = reader.target is ops.fused_linear.overload and len(reader.args) > 3
    return is_once and not (is_normed and reader.args[3] is not None)
