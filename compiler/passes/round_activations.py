"""Rounds activations in block formats, for targets with float arithmetic.

Inputs of matmuls and block outputs are rounded. Formats outside ``ROUNDED`` are reported by the
target's contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.rewrite import emit, find_calls
from tilewright.compiler.passes.runner import PassContext, numerics_changing_pass

ROUNDED: Mapping[str, ops.Operator] = {"q80": ops.round_q80}
"""Rounding operator by activation format."""


@numerics_changing_pass
def round_activations(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace ``linear(x, w)`` with ``linear(round_q80(x), w)``. Linears with a common input share
    the op.

    If ``block_output`` requests it, also round the outputs of wo and down before their readers.
    Router inputs stay unrounded, as in dllama: rounding must not change the selected experts.
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
    """Redirect a matmul's users to its rounded output. Return the rewrite count, 0 or 1."""
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
