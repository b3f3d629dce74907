"""Activations in a block format are rounded where a product reads them, for targets that compute
in float; what such a target does not round to stays a matter of its contract.
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
    """``linear(x, w)`` reads ``round_q80(x)``; products of one x share it.

    A router's input stays as it is, as dllama has it: which experts are used must not change.
    """
    rounded: dict[tuple[Node, str], Node] = {}
    count = 0
    for node in find_calls(graph_module.graph, ops.linear):
        facts, x = info(node), node.args[0]
        wanted = facts.formats.in0 if facts.formats is not None else ""
        assert isinstance(x, Node)
        if wanted not in ROUNDED or facts.tensor_group == "router":
            continue
        if x.target is ROUNDED[wanted].overload:
            continue
        if (x, wanted) not in rounded:
            own = NodeInfo(fqn=facts.fqn, layer=facts.layer)
            rounded[x, wanted] = emit(node, ROUNDED[wanted], (x,), facts=own)
        node.update_arg(0, rounded[x, wanted])
        count += 1
    return count
