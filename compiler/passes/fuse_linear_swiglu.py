"""Fuses a merged gate and up linear with the ``swiglu_packed`` after it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def fuse_linear_swiglu(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse a ``swiglu_packed`` with a linear, if it is the linear's only reader.

    The fused op retains the linear's metadata. Return the fused op count.
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
