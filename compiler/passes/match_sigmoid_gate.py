"""Replaces ``x * sigmoid(gate)`` with sigmoid_gate."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import Bindings, CallPattern, Var, emit, rewrite_matches
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_PATTERN = CallPattern(
    aten.mul.Tensor, Var("x"), CallPattern(aten.sigmoid.default, Var("gate")), commutative=True
)


@graph_pass
def match_sigmoid_gate(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace ``x * sigmoid(gate)`` if the gate has the width of ``x`` or a single column.

    Return the gate count.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        x, gate = (tuple(found[name].meta["val"].shape) for name in ("x", "gate"))
        if len(x) != len(gate) or gate[:-1] != x[:-1] or gate[-1] not in (1, x[-1]):
            return None
        return emit(root, ops.sigmoid_gate, (found["x"], found["gate"]), facts=info(root))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
