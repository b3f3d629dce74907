"""Fuses a router and its gated experts into a block of experts."""

from __future__ import annotations

import dataclasses
import operator

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    rewrite_matches,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass

_CHOICE = CallPattern(
    ops.router.overload, Var("logits"), LiteralPattern("top_k"), LiteralPattern("renormalise")
)
_WEIGHTS = CallPattern(operator.getitem, _CHOICE, 0)
_EXPERTS = CallPattern(operator.getitem, _CHOICE, 1)


def _product(name: str) -> CallPattern:
    return CallPattern(ops.expert_linear.overload, Var("x"), Var(name), _EXPERTS)


_INNER = CallPattern(ops.swiglu.overload, _product("gate"), _product("up"))
_PATTERN = CallPattern(ops.expert_linear.overload, _INNER, Var("down"), _EXPERTS, _WEIGHTS)


@graph_pass
def fuse_experts(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace a router, its expert matmuls and their sum with an ``experts`` op.

    A sigmoid router remains. The metadata of each matmul (op group, formats, fidelity) moves to its
    weight: the op has three.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        inner, choice = root.args[0], root.args[2]
        assert isinstance(inner, Node) and isinstance(choice, Node)
        if len(choice.all_input_nodes[0].args) > 3:  # a sigmoid router
            return None
        gate, up = inner.args
        for product, name in ((gate, "gate"), (up, "up"), (root, "down")):
            assert isinstance(product, Node)
            facts = info(product)
            set_info(
                found[name], op_group=facts.op_group, formats=facts.formats, compute=facts.compute
            )
        names = ("x", "logits", "gate", "up", "down", "top_k", "renormalise")
        facts = dataclasses.replace(
            info(root),
            fqn=info(root).fqn.rpartition(".")[0],
            tensor_group=None,
            op_group=None,
            formats=None,
            compute=None,
        )
        return emit(root, ops.experts, [found[name] for name in names], facts=facts)

    return rewrite_matches(graph_module.graph, _PATTERN, build)
