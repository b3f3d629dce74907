"""aten.gelu becomes our gelu, whose approximation is an argument like any other."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def match_gelu(graph_module: GraphModule, ctx: PassContext) -> int:
    """One rewrite a call."""
    found = find_calls(graph_module.graph, torch.ops.aten.gelu.default)
    for node in found:
        args = (node.args[0], node.kwargs.get("approximate", "none"))
        replace(node, emit(node, ops.gelu, args, facts=info(node)))
    return len(found)
