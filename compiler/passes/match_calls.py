"""Replaces aten operators with equivalent Tilewright operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

# Tilewright's operator, and its arguments from an aten call.
_TABLE: Mapping[Any, tuple[ops.Operator, Callable[[Node], tuple[Any, ...]]]] = {
    # The weight is torch's first argument.
    aten.embedding.default: (ops.embedding, lambda node: (node.args[1], node.args[0])),
    aten.linear.default: (ops.linear, lambda node: node.args),
    # The approximation is torch's keyword.
    aten.gelu.default: (
        ops.gelu,
        lambda node: (node.args[0], node.kwargs.get("approximate", "none")),
    ),
}


@graph_pass
def match_calls(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace each call of aten's embedding, linear and gelu."""
    found = find_calls(graph_module.graph, *_TABLE)
    for node in found:
        operation, arguments_of = _TABLE[node.target]
        replace(node, emit(node, operation, arguments_of(node), facts=info(node)))
    return len(found)
