"""Activations in a block format are rounded where a product reads them, and where a block gives
them to the residual stream, for targets that compute in float; what such a target does not round
to stays a matter of its contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.rewrite import emit, find_calls
from tilewright.compiler.passes.runner import PassContext, numerics_changing_pass

ROUNDED: Mapping[str, ops.Operator] = {"q80": ops.round_q80}
"""Activation formats that the pass rounds to, and by which operator."""


@numerics_changing_pass
def round_activations(graph_module: GraphModule, ctx: PassContext) -> int:
    """Makes ``linear(x, w)`` read ``round_q80(x)``, which the products of one ``x`` share, and
    rounds what wo and down give before anything reads it, where ``block_output`` says so.

    A router's input stays as it is, as dllama has it: which experts are used must not change.
    """
    count = 0
    for node in find_calls(graph_module.graph, ops.linear, ops.expert_linear):
        count += _round_output(node)
    rounded: dict[tuple[Node, str], Node] = {}
    for node in find_calls(graph_module.graph, ops.linear):
        facts, x = info(node), node.args[0]
        wanted = facts.formats.in0 if facts.formats is not None else ""
        assert isinstance(x, Node)
        if wanted not in ROUNDED or facts.tensor_group == "router":
            continue
        if x.target is ROUNDED[wanted].overload:
            continue
        if (x, wanted) not in rounded:
            rounded[x, wanted] = emit(node, ROUNDED[wanted], (x,), facts=_place(node))
        node.update_arg(0, rounded[x, wanted])
        count += 1
    return count


def _round_output(node: Node) -> int:
    """Let the product's users read it rounded; how many products that were: 0 or 1."""
    formats = info(node).formats
    if formats is None or formats.out not in ROUNDED:
        return 0
    operator = ROUNDED[formats.out]
    if all(user.target is operator.overload for user in node.users):
        return 0
    rounded = emit(node.next, operator, (node,), facts=_place(node))
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    return 1


def _place(node: Node) -> NodeInfo:
    return NodeInfo(fqn=info(node).fqn, layer=info(node).layer)
