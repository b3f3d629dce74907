"""Merges the linear attention gates with the much larger linear on the same input."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.merge_parallel_linears import merge, why_apart
from tilewright.compiler.passes.runner import PassContext, graph_pass

_GROUPS = ("delta_in", "delta_gates")


@graph_pass
def merge_delta_gates(graph_module: GraphModule, ctx: PassContext) -> int:
    """Merge the gates with the linear if formats and fidelities are equal. The result is
    ``delta_in``.

    Most configurations have different formats for gates. Therefore no note reports unmerged gates.
    """
    count = 0
    for product in find_calls(graph_module.graph, ops.linear):
        if info(product).tensor_group != _GROUPS[0]:
            continue
        family = [product, *_gates_behind(product)]
        if len(family) > 1 and not why_apart(family):
            merge(family)
            count += 1
    return count


def _gates_behind(product: Node) -> list[Node]:
    """Return later gates on the same input. Their readers are then also later."""
    source = product.args[0]
    assert isinstance(source, Node)
    readers = [each for each in source.users if each.target is ops.linear.overload]
    return [each for each in readers if info(each).tensor_group == _GROUPS[1] and product < each]
