"""Replaces swiglu on the halves of a merged linear with swiglu on its whole output."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    rewrite_matches,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass

_SPLIT = CallPattern(
    torch.ops.aten.split_with_sizes.default, Var("packed"), LiteralPattern("sizes"), -1
)
_PATTERN = CallPattern(
    ops.swiglu.overload,
    CallPattern(operator.getitem, _SPLIT, 0),
    CallPattern(operator.getitem, _SPLIT, 1),
)


@graph_pass
def fuse_swiglu_packed(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace a ``swiglu`` of a linear's two halves with ``swiglu_packed`` of its output.

    Unmerged gate and up linears are unchanged.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        if len(found["sizes"]) != 2 or found["sizes"][0] != found["sizes"][1]:
            return None
        return emit(root, ops.swiglu_packed, (found["packed"],), facts=info(root))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
