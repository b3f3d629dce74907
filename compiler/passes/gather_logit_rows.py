"""Limits the output layer to the requested rows."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler.ir.info import INPUT, NodeInfo
from tilewright.compiler.ir.rewrite import add_input, emit, fake_input
from tilewright.compiler.ir.verify import head_of
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def gather_logit_rows(graph_module: GraphModule, ctx: PassContext) -> int:
    """Add an input ``logit_rows [R]``. It selects hidden states before the output layer.

    Elementwise operations after the output layer then have these rows only.
    """
    head, after = head_of(graph_module)
    if head is None:
        return 0
    hidden, weight, *rest = head.args
    assert isinstance(hidden, Node)
    rows_fake = fake_input(hidden, ("num_logit_rows",), torch.int64)
    rows = add_input(graph_module.graph, "logit_rows", rows_fake, NodeInfo(role=INPUT))
    gathered = emit(head, torch.ops.aten.index_select.default, (hidden, 0, rows))
    head.args = (gathered, weight, *rest)
    for node in (head, *after):
        shape = (rows.meta["val"].shape[0], *node.meta["val"].shape[1:])
        node.meta["val"] = node.meta["val"].new_empty(shape)
    return 1
