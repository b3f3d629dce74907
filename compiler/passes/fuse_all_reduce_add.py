"""The sum over ranks takes in the residual add that reads it, and the norm behind that."""

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
    """Makes one operator of an `all_reduce`, the add that alone reads it, and the norm of that sum
    where nothing but products read it. Returns the number of adds.
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
    """The operands of an add of equal shapes, of which one is a sum over ranks with one reader."""
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
    """The one norm of a sum, where products read it as it is: none is left for a later pass."""
    norms = [each for each in total.users if each.target is ops.rms_norm.overload]
    if len(norms) != 1 or norms[0].args[0] is not total or not norms[0].users:
        return None
    weight = norms[0].args[1]
    if not isinstance(weight, Node) or weight.op != "placeholder":  # made behind the sum, maybe
        return None
    is_operand = all(_reads_as_it_is(reader, norms[0]) for reader in norms[0].users)
    return norms[0] if is_operand else None


def _reads_as_it_is(reader: Node, norm: Node) -> bool:
    if reader.target not in _PRODUCTS or reader.args[0] is not norm:
        return False
    is_once = all(each is not norm for each in reader.args[1:])
    is_normed = reader.target is ops.fused_linear.overload and len(reader.args) > 3
    return is_once and not (is_normed and reader.args[3] is not None)
