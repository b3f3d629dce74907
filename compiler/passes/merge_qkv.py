"""Merges the linears of q, k and v only, for targets with separate gate and up."""

from __future__ import annotations

from torch.fx import GraphModule

from tilewright.compiler.passes.merge_parallel_linears import merge_families
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def merge_qkv(graph_module: GraphModule, ctx: PassContext) -> int:
    """Merge the parallel matmuls of q, k and v. An attention's gate is not merged."""
    return merge_families(graph_module, ctx, ("wqkv",), without="gate_proj")
