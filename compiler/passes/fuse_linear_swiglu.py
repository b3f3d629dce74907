"""A merged gate and up product takes in the swiglu_packed that reads it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def fuse_linear_swiglu(graph_module: GraphModule, ctx: PassContext) -> int:
    """Moves each ``swiglu_packed`` into the product that it alone reads, which keeps its facts.
    Returns their number.
    """
    count = 0
    for node in find_calls(graph_module.graph, ops.swiglu_packed):
        product = node.args[0]
        if not isinstance(product, Node) or product.target is not ops.linear.overload:
            continue
        if len(product.users) > 1:
            continue
        args = ops.FusedArguments.of(product.args)._replace(swiglu=True)
        replace(node, emit(node, ops.fused_linear, args, facts=info(product)))
        graph_module.graph.erase_node(product)
        count += 1
    return count
