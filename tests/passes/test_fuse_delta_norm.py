"""The delta rule takes in its norm and its gate where nobody else reads them."""

from __future__ import annotations

import torch

from tests.models.test_qwen3_5_moe import make
from tests.tiny import check_golden, lowered, precision_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_lowered
from tilewright.compiler.passes.fuse_delta_norm import fuse_delta_norm
from tilewright.compiler.passes.runner import run_passes

NAME = "fuse_delta_norm"


def test_a_models_numbers_stay_and_the_golden_text() -> None:
    model = make()
    graph_module, ctx = lowered(model, until=NAME, target="cuda", precision=precision_of("bfp8"))
    inputs = step_inputs(9) | {"logit_rows": torch.tensor([8, 2])}
    before = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [fuse_delta_norm], ctx, verify=verify_lowered)
    assert ctx.reports[-1].num_rewrites == 3
    assert not find_calls(graph_module.graph, ops.gated_delta_rule_step)
    got = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(got, before, atol=1e-6, rtol=1e-6)
    check_golden("passes/fuse_delta_norm_hybrid.txt", graph_text(graph_module.graph, layer=1))


def test_what_others_read_too_is_left_alone() -> None:
    """The rule in one layer, its norm in the next, the gated norm in the third."""
    graph_module, ctx = lowered(make(), until=NAME, target="cuda", precision=precision_of())
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    extra = []
    for index, rule in enumerate(find_calls(graph, ops.gated_delta_rule_step)):
        node = rule
        for _ in range(index):
            node = next(iter(node.users))
        extra.append(node)
    output.args = ((output.args[0], *extra),)
    assert fuse_delta_norm(graph_module, ctx) == 0


def test_the_norm_of_anything_else_is_left_alone() -> None:
    graph_module, ctx = lowered(make(), until=NAME, target="cuda", precision=precision_of())
    for rule in find_calls(graph_module.graph, ops.gated_delta_rule_step):
        rule.target = torch.ops.aten.mm.default
    assert fuse_delta_norm(graph_module, ctx) == 0
