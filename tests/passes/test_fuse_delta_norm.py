"""The delta rule takes in its norm and its gate where nobody else reads them."""

from __future__ import annotations

import torch

from tests.models.test_qwen3_5_moe import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import lowered, precision_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_lowered
from tilewright.compiler.passes.fuse_delta_norm import fuse_delta_norm
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %gated_delta_rule_step0: float32[T, 4, 16] = gated_delta_rule_step(%causal_conv1d_step0,
      %split_with_sizes1.0, %split_with_sizes1.1, linear_attn.A_log, linear_attn.dt_bias, 2, 16,
      linear_attn.memory, positions, cu_seqlens, slots)
- %rms_norm1: float32[T, 4, 16] = rms_norm(%gated_delta_rule_step0, linear_attn.norm, 1e-06)
- %unflatten0: float32[T, 4, 16] = aten.unflatten.int(%split_with_sizes0.1, -1, [-1, 16])
- %swiglu0: float32[T, 4, 16] = swiglu(%unflatten0, %rms_norm1)
- %flatten0: float32[T, 64] = aten.flatten.using_ints(%swiglu0, -2)
- %fused_linear0: float32[T, 32] = fused_linear(%flatten0, linear_attn.out_proj, None, None, 0.0,
      %in0, False)  {group=delta_out, weight=bfp8, fidelity=hifi4}
+ %delta_rule_norm_step0: float32[T, 64] = delta_rule_norm_step(%causal_conv1d_step0,
      %split_with_sizes1.0, %split_with_sizes1.1, linear_attn.A_log, linear_attn.dt_bias, 2, 16,
      linear_attn.memory, positions, cu_seqlens, slots, %split_with_sizes0.1, linear_attn.norm,
      1e-06)
+ %fused_linear0: float32[T, 32] = fused_linear(%delta_rule_norm_step0, linear_attn.out_proj,
      None, None, 0.0, %in0, False)  {group=delta_out, weight=bfp8, fidelity=hifi4}"""

NAME = "fuse_delta_norm"


def test_a_models_numbers_stay_and_the_rewrite_is_expected() -> None:
    model = make()
    graph_module, ctx = lowered(model, until=NAME, target="cuda", precision=precision_of("bfp8"))
    inputs = step_inputs(9) | {"logit_rows": torch.tensor([8, 2])}
    before = run_graph(graph_module, model, **inputs)
    text = graph_text(graph_module.graph, layer=1)
    run_passes(graph_module, [fuse_delta_norm], ctx, verify=verify_lowered)
    assert ctx.reports[-1].num_rewrites == 3
    assert not find_calls(graph_module.graph, ops.gated_delta_rule_step)
    got = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(got, before, atol=1e-6, rtol=1e-6)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=1)) == REWRITE


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
