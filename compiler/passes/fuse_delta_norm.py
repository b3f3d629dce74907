"""Fuses the gated delta rule with the norm of its heads and the gate."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    rewrite_matches,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten

_NORM = CallPattern(ops.rms_norm.overload, Var("rule"), Var("weight"), LiteralPattern("eps"))
_GATED = CallPattern(
    ops.swiglu.overload,
    CallPattern(aten.unflatten.int, Var("z"), -1, LiteralPattern("heads")),
    _NORM,
)
_PATTERN = CallPattern(aten.flatten.using_ints, _GATED, -2)


@graph_pass
def fuse_delta_norm(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse a delta rule with its gated norm if both have no other reader. Return the number of
    rules.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        rule, swiglu = found["rule"], root.all_input_nodes[0]
        if rule.target is not ops.gated_delta_rule_step.overload:
            return None
        norm: Any = swiglu.args[1]
        if any(len(each.users) > 1 for each in (rule, norm, swiglu)):
            return None
        args = (*rule.args, found["z"], found["weight"], found["eps"])
        return emit(root, ops.delta_rule_norm_step, args, facts=info(rule))

    return rewrite_matches(graph_module.graph, _PATTERN, build)
