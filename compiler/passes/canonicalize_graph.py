"""Remove what export leaves behind: metadata assertions, casts to the same type, aliases."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default}
_ALIASES = {
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.dropout.default,
    aten.lift_fresh_copy.default,
}


@graph_pass
def canonicalize_graph(graph_module: GraphModule, ctx: PassContext) -> int:
    """Erase assertions and every node that returns its input unchanged."""
    count = 0
    for node in list(graph_module.graph.nodes):
        if node.target in _ASSERTIONS:
            graph_module.graph.erase_node(node)
        elif _returns_input(node):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        else:
            continue
        count += 1
    return count


def _returns_input(node: Node) -> bool:
    if node.target in _ALIASES:
        training = len(node.args) > 2 and bool(node.args[2])
        return not (node.target is aten.dropout.default and training)
    if node.target not in _CASTS or not isinstance(node.args[0], Node):
        return False
    return bool(node.meta["val"].dtype == node.args[0].meta["val"].dtype)
