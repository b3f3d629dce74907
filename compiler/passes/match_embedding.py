"""aten.embedding becomes our embedding."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def match_embedding(graph_module: GraphModule, ctx: PassContext) -> int:
    """One rewrite a table; torch's argument order (table first) is turned round."""
    found = find_calls(graph_module.graph, torch.ops.aten.embedding.default)
    for node in found:
        weight, tokens = node.args[:2]
        replace(node, emit(node, ops.embedding, (tokens, weight), facts=info(node)))
    return len(found)
