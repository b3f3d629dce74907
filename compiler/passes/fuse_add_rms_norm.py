"""Fuses a residual add with the norm after it."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def fuse_add_rms_norm(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace a sum and its norm with ``add_rms_norm``. Return the norm count.

    The second result is the sum, for its other readers.
    """
    count = 0
    for norm in find_calls(graph_module.graph, ops.rms_norm):
        total, weight, eps = norm.args
        if not _is_residual_add(total):
            continue
        assert isinstance(total, Node)
        fused = emit(total, ops.add_rms_norm, (*total.args, weight, eps), facts=info(norm))
        normed = emit(total, operator.getitem, (fused, 0), facts=info(norm))
        summed = emit(total, operator.getitem, (fused, 1), facts=info(total))
        replace(norm, normed)
        replace(total, summed)
        count += 1
    return count


def _is_residual_add(node: object) -> bool:
    if not isinstance(node, Node) or node.target is not torch.ops.aten.add.Tensor:
        return False
    operands = [argument for argument in node.args if isinstance(argument, Node)]
    shapes = [tuple(operand.meta["val"].shape) for operand in operands]
    return len(operands) == 2 and not node.kwargs and shapes[0] == shapes[1]
