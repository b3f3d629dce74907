"""Only the products of q, k and v become one: for targets that want gate and up apart."""

from __future__ import annotations

from torch.fx import GraphModule

from tilewright.compiler.passes.merge_parallel_linears import merge_families
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def merge_qkv(graph_module: GraphModule, ctx: PassContext) -> int:
    """Merges the parallel products of tensor group ``wqkv``, and leaves all others apart."""
    return merge_families(graph_module, ctx, ("wqkv",))
