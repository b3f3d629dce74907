"""aten.linear becomes our linear."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def match_linear(graph_module: GraphModule, ctx: PassContext) -> int:
    """One rewrite a product."""
    found = find_calls(graph_module.graph, torch.ops.aten.linear.default)
    for node in found:
        replace(node, emit(node, ops.linear, node.args, facts=info(node)))
    return len(found)
