"""Replaces the five nodes of a written-out RMSNorm with rms_norm."""

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

aten = torch.ops.aten

_MEAN_SQUARE = CallPattern(
    aten.mean.dim, CallPattern(aten.pow.Tensor_Scalar, Var("x"), 2), [-1], True
)
_SCALE = CallPattern(
    aten.rsqrt.default, CallPattern(aten.add.Tensor, _MEAN_SQUARE, LiteralPattern("eps"))
)
_NORMED = CallPattern(aten.mul.Tensor, Var("x"), _SCALE, commutative=True)
_PATTERN = CallPattern(aten.mul.Tensor, _NORMED, Var("weight"), commutative=True)


@graph_pass
def match_rms_norm(graph_module: GraphModule, ctx: PassContext) -> int:
    """Match ``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension, ``weight [C]``."""

    def build(root: Node, found: Bindings) -> Node | None:
        if found["weight"].meta["val"].shape != found["x"].meta["val"].shape[-1:]:
            return None
        args = (found["x"], found["weight"], float(found["eps"]))
        return emit(root, ops.rms_norm, args, facts=info(root))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
