"""The gates join the product beside them where nothing tells their weights apart."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_qwen3_5 import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import lowered, precision_of, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.merge_delta_gates import merge_delta_gates
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %linear0: float32[T, 192] = linear(%rms_norm0, linear_attn.in_proj_qkv_in_proj_z)
      {group=delta_in, weight=bf16, fidelity=hifi4}
- %split_with_sizes0: (float32[T, 128], float32[T, 64]) = aten.split_with_sizes.default(%linear0,
      [128, 64], -1)
- %causal_conv1d0: float32[T, 128] = causal_conv1d(%split_with_sizes0.0, linear_attn.conv1d)
- %linear2: float32[T, 8] = linear(%rms_norm0, linear_attn.in_proj_a_in_proj_b)
      {group=delta_gates, weight=bf16, fidelity=hifi4}
- %split_with_sizes3: (float32[T, 4], float32[T, 4]) = aten.split_with_sizes.default(%linear2, [4,
      4], -1)
- %gated_delta_rule0: float32[T, 4, 16] = gated_delta_rule(%causal_conv1d0, %split_with_sizes3.0,
      %split_with_sizes3.1, linear_attn.A_log, linear_attn.dt_bias, 2, 16)
+ %linear1: float32[T, 200] = linear(%rms_norm0,
      linear_attn.in_proj_qkv_in_proj_z_in_proj_a_in_proj_b)  {group=delta_in, weight=bf16,
      fidelity=hifi4}
+ %split_with_sizes1: (float32[T, 192], float32[T, 8]) = aten.split_with_sizes.default(%linear1,
      [192, 8], -1)
+ %split_with_sizes2: (float32[T, 128], float32[T, 64]) =
      aten.split_with_sizes.default(%split_with_sizes1.0, [128, 64], -1)
+ %causal_conv1d0: float32[T, 128] = causal_conv1d(%split_with_sizes2.0, linear_attn.conv1d)
+ %split_with_sizes4: (float32[T, 4], float32[T, 4]) =
      aten.split_with_sizes.default(%split_with_sizes1.1, [4, 4], -1)
+ %gated_delta_rule0: float32[T, 4, 16] = gated_delta_rule(%causal_conv1d0, %split_with_sizes4.0,
      %split_with_sizes4.1, linear_attn.A_log, linear_attn.dt_bias, 2, 16)
- %unflatten0: float32[T, 4, 16] = aten.unflatten.int(%split_with_sizes0.1, -1, [-1, 16])
+ %unflatten0: float32[T, 4, 16] = aten.unflatten.int(%split_with_sizes2.1, -1, [-1, 16])"""

NAME = "merge_delta_gates"


def test_a_models_numbers_stay_and_the_rewrite_is_expected() -> None:
    model = make()
    precision = precision_of("bf16")
    graph_module, ctx = lowered(model, until=NAME, target="cuda", precision=precision)
    before = run_graph(graph_module, model, **step_inputs(9))
    count = len(find_calls(graph_module.graph, ops.gated_delta_rule))
    text = graph_text(graph_module.graph, layer=0)
    run_passes(graph_module, [merge_delta_gates], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == count > 0 and not ctx.notes
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=0)) == REWRITE


def test_gates_are_the_last_rows() -> None:
    graph_module, _ = lowered(make(), target="cuda", precision=precision_of("bf16"))
    product = find_calls(graph_module.graph, ops.fused_linear)[0]
    recipe = info(product.args[1]).recipe  # type: ignore[arg-type]
    assert recipe is not None
    assert [each.part for each in recipe.segments[-2:]] == ["in_proj_a", "in_proj_b"]
    assert info(product).tensor_group == "delta_in"


@pytest.mark.parametrize(
    ("name", "layers"), [("bfp8", None), ("bf16", "*.in_proj_qkv: {li_qkv_decode: lofi}")]
)
def test_what_differs_stays_apart(name: str, layers: str | None) -> None:
    precision = precision_of(name, layers=layers) if layers else precision_of(name)
    graph_module, ctx = lowered(make(), until=NAME, target="cuda", precision=precision)
    products = len(find_calls(graph_module.graph, ops.linear))
    run_passes(graph_module, [merge_delta_gates], ctx)
    assert ctx.reports[-1].num_rewrites == 0
    assert len(find_calls(graph_module.graph, ops.linear)) == products


def test_it_leaves_other_models_alone() -> None:
    graph_module, ctx = lowered(tiny_model(), until=NAME, target="cuda")
    run_passes(graph_module, [merge_delta_gates], ctx)
    assert ctx.reports[-1].num_rewrites == 0
