"""Replaces ``silu(gate) * up`` with swiglu."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import Bindings, CallPattern, Var, emit, rewrite_matches
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_PATTERN = CallPattern(
    aten.mul.Tensor, CallPattern(aten.silu.default, Var("gate")), Var("up"), commutative=True
)


@graph_pass
def match_swiglu(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace ``silu(gate) * up`` if both shapes are equal. Return the replacement count."""

    def build(root: Node, found: Bindings) -> Node | None:
        if found["gate"].meta["val"].shape != found["up"].meta["val"].shape:
            return None
        return emit(root, ops.swiglu, (found["gate"], found["up"]), facts=info(root))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
