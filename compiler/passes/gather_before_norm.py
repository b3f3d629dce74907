"""Moves a gather before a norm, so that the norm is adjacent to its linear."""

from __future__ import annotations

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

_GATHER = torch.ops.aten.index_select.default
_NORM = CallPattern(ops.rms_norm.overload, Var("x"), Var("weight"), LiteralPattern("eps"))
_PATTERN = CallPattern(_GATHER, _NORM, 0, Var("rows"))


@graph_pass
def gather_before_norm(graph_module: GraphModule, ctx: PassContext) -> int:
    """Move a gather before a norm without other readers. Only the gathered rows are then
    normalized.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        norm = root.args[0]
        assert isinstance(norm, Node)
        if len(norm.users) > 1 or found["x"].meta["val"].ndim < 2:
            return None  # along its only dimension a norm depends on all that it reads
        gathered = emit(root, _GATHER, (found["x"], 0, found["rows"]), facts=info(root))
        args = (gathered, found["weight"], found["eps"])
        return emit(root, ops.rms_norm, args, facts=info(norm))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
