"""The nodes of a written-out rotary embedding become one rope."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.ir.info import info
from compiler.ir.rewrite import Bindings, Call, Var, emit, rewrite_matches
from compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_POSITIONS = Call(aten.unsqueeze.default, Call(aten.to.dtype, Var("positions"), torch.float32), -1)
_ANGLES = Call(aten.mul.Tensor, _POSITIONS, Var("inv_freq"), commutative=True)
_COS = Call(aten.unsqueeze.default, Call(aten.cos.default, _ANGLES), 1)
_SIN = Call(aten.unsqueeze.default, Call(aten.sin.default, _ANGLES), 1)
_HALVES = Call(aten.chunk.default, Var("x"), 2, -1)
_FIRST, _SECOND = Call(operator.getitem, _HALVES, 0), Call(operator.getitem, _HALVES, 1)


def _times(left: Call, right: Call) -> Call:
    return Call(aten.mul.Tensor, left, right, commutative=True)


_PATTERN = Call(
    aten.cat.default,
    [
        Call(aten.sub.Tensor, _times(_FIRST, _COS), _times(_SECOND, _SIN)),
        Call(aten.add.Tensor, _times(_SECOND, _COS), _times(_FIRST, _SIN), commutative=True),
    ],
    -1,
)


@graph_pass
def match_rope(graph_module: GraphModule, ctx: PassContext) -> int:
    """Matches the half-split form over all channels of a head."""

    def build(root: Node, found: Bindings) -> Node:
        args = (found["x"], found["positions"], found["inv_freq"])
        return emit(root, ops.rope, args, facts=info(root))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
