"""Replaces a written-out rotary embedding with rope."""

from __future__ import annotations

import operator
from typing import Any

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

_POSITIONS = CallPattern(
    aten.unsqueeze.default, CallPattern(aten.to.dtype, Var("positions"), torch.float32), -1
)
_ANGLES = CallPattern(aten.mul.Tensor, _POSITIONS, Var("inv_freq"), commutative=True)


def _times(left: Any, right: Any) -> CallPattern:
    return CallPattern(aten.mul.Tensor, left, right, commutative=True)


def _rotation(*, scaled: bool) -> CallPattern:
    """Return the pattern for all channels. ``scaled`` includes a factor for cosines and sines."""
    cos, sin = CallPattern(aten.cos.default, _ANGLES), CallPattern(aten.sin.default, _ANGLES)
    if scaled:
        cos, sin = _times(cos, LiteralPattern("factor")), _times(sin, LiteralPattern("factor"))
    cos, sin = (
        CallPattern(aten.unsqueeze.default, cos, 1),
        CallPattern(aten.unsqueeze.default, sin, 1),
    )
    halves = CallPattern(aten.chunk.default, Var("x"), 2, -1)
    first, second = (
        CallPattern(operator.getitem, halves, 0),
        CallPattern(operator.getitem, halves, 1),
    )
    parts = [
        CallPattern(aten.sub.Tensor, _times(first, cos), _times(second, sin)),
        CallPattern(aten.add.Tensor, _times(second, cos), _times(first, sin), commutative=True),
    ]
    return CallPattern(aten.cat.default, parts, -1)


_SPLIT = CallPattern(aten.split_with_sizes.default, Var("whole"), LiteralPattern("sizes"), -1)
_TURNED = CallPattern(ops.rope.overload, CallPattern(operator.getitem, _SPLIT, 0))
_PARTIAL = CallPattern(aten.cat.default, [_TURNED, CallPattern(operator.getitem, _SPLIT, 1)], -1)


@graph_pass
def match_rope(graph_module: GraphModule, ctx: PassContext) -> int:
    """Match the half-split form over a head's channels, or over its first channels."""

    def build(root: Node, found: Bindings) -> Node:
        factor = (False, found["factor"]) if "factor" in found else ()
        args = (found["x"], found["positions"], found["inv_freq"], *factor)
        return emit(root, ops.rope, args, facts=info(root))

    graph = graph_module.graph
    count = sum(rewrite_matches(graph, _rotation(scaled=each), build) for each in (False, True))
    rewrite_matches(graph, _PARTIAL, _turn_first_channels)
    return count


def _turn_first_channels(root: Node, found: Bindings) -> Node | None:
    """Extend a rope of a head's first channels to the whole head: rope copies the remaining
    channels.
    """
    parts: Any = root.args[0]
    turned = parts[0]
    if len(found["sizes"]) != 2 or found["sizes"][0] != 2 * turned.args[2].meta["val"].shape[0]:
        return None
    return emit(root, ops.rope, (found["whole"], *turned.args[1:]), facts=info(turned))
