"""Replaces softmax, top-k and their normalization with router."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import (
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    find_calls,
    match,
    replace,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_PROBABILITIES = CallPattern(aten.softmax.int, Var("logits"), -1)
_CHOSEN = CallPattern(aten.topk.default, _PROBABILITIES, LiteralPattern("top_k"))
_SUM = CallPattern(aten.sum.dim_IntList, Var("weights"), [-1], True)
_SHARE = CallPattern(aten.div.Tensor, Var("weights"), _SUM)


@graph_pass
def match_router(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace each expert selection with ``router``. Return the router count.

    The selection is softmax and top-k, optionally divided by the sum of the selected weights.
    """
    count = 0
    for node in find_calls(graph_module.graph, aten.topk.default):
        found = match(_CHOSEN, node)
        pieces = {user.args[1]: user for user in node.users}
        if found is None or not _takes_the_largest(node):
            continue
        weights = pieces.get(0)
        shares = [] if weights is None else [each for each in weights.users if _is_share(each)]
        renormalise = bool(shares) and weights is not None and len(weights.users) == 2
        args = (found["logits"], found["top_k"], renormalise)
        chosen = emit(node, ops.router, args, facts=info(node))
        for index, piece in pieces.items():
            fresh = emit(node, operator.getitem, (chosen, index), facts=info(node))
            if index == 0 and renormalise:
                replace(shares[0], fresh)
            else:
                replace(piece, fresh)
        count += 1
    return count


def _takes_the_largest(node: Node) -> bool:
    """Return whether top-k selects the largest values on the last axis, explicitly or by
    default.
    """
    more = node.args[2:]
    return more[:1] in ((), (-1,)) and all(more[1:])


def _is_share(node: Node) -> bool:
    return match(_SHARE, node) is not None
