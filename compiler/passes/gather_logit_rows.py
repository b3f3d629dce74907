"""The head computes logits only for the rows that are asked for."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.ir.info import INPUT, NodeInfo
from compiler.ir.rewrite import add_input, emit, fake_input
from compiler.passes.runner import PassContext, graph_pass


@graph_pass
def gather_logit_rows(graph_module: GraphModule, ctx: PassContext) -> int:
    """A new input ``logit_rows [R]`` picks rows of the hidden states before the last product."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    head = output.args[0]
    if not isinstance(head, Node) or head.target is not ops.linear.overload:
        return 0
    hidden, weight, *rest = head.args
    assert isinstance(hidden, Node)
    rows_fake = fake_input(hidden, ("num_logit_rows",), torch.int64)
    rows = add_input(graph_module.graph, "logit_rows", rows_fake, NodeInfo(role=INPUT))
    gathered = emit(head, torch.ops.aten.index_select.default, (hidden, 0, rows))
    head.args = (gathered, weight, *rest)
    head.meta["val"] = head.meta["val"].new_empty(
        (rows.meta["val"].shape[0], *head.meta["val"].shape[1:])
    )
    return 1
