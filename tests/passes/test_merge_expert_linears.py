"""Gate and up of an expert become one product where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.models.test_qwen3_moe import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import context_of, lowered, precision_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.merge_expert_linears import merge_expert_linears
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %expert_linear0: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.gate_proj,
      %router0.1)  {group=experts_ff1_3, weight=bfp8, fidelity=hifi4}
- %expert_linear1: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.up_proj, %router0.1)
      {group=experts_ff1_3, weight=bfp8, fidelity=hifi4}
- %swiglu0: float32[T, 2, 24] = swiglu(%expert_linear0, %expert_linear1)
- %expert_linear2: float32[T, 32] = expert_linear(%swiglu0, mlp.experts.down_proj, %router0.1,
      %router0.0)  {group=experts_ff2, weight=bfp8, fidelity=hifi4}
+ %fused_expert_linear0: float32[T, 2, 24] = fused_expert_linear(%rms_norm3,
      mlp.experts.gate_proj_up_proj, %router0.1, None, True)  {group=experts_ff1_3, weight=bfp8,
      fidelity=hifi4}
+ %expert_linear2: float32[T, 32] = expert_linear(%fused_expert_linear0, mlp.experts.down_proj,
      %router0.1, %router0.0)  {group=experts_ff2, weight=bfp8, fidelity=hifi4}"""

NAME = "merge_expert_linears"


@pytest.mark.parametrize(("name", "axis"), [("bfp8", "in"), ("bfp4", "in"), ("bf16", "out")])
def test_a_models_numbers_stay_and_the_rewrite_is_expected(name: str, axis: str) -> None:
    model, precision = make(), precision_of(name, block_axis=axis)
    graph_module, ctx = lowered(model, until=NAME, target="cuda", precision=precision)
    before = run_graph(graph_module, model, **step_inputs(9))
    text = graph_text(graph_module.graph, layer=1)
    run_passes(graph_module, [merge_expert_linears], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == 2 and not ctx.notes
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    if name == "bfp8":
        assert rewrite_text(text, graph_text(graph_module.graph, layer=1)) == REWRITE


def test_an_experts_gate_stands_above_its_up() -> None:
    graph_module, _ = lowered(make(), target="cuda", precision=precision_of("bf16"))
    product = find_calls(graph_module.graph, ops.fused_expert_linear)[0]
    recipe = info(product.args[1]).recipe  # type: ignore[arg-type]
    assert recipe is not None and recipe.shape == (6, 48, 32)
    path = "model.layers.0.mlp.experts"
    assert recipe.names[:4] == (
        *(f"{path}.0.gate_proj.weight", f"{path}.0.up_proj.weight"),
        *(f"{path}.1.gate_proj.weight", f"{path}.1.up_proj.weight"),
    )
    assert info(product).fqn == f"{path}.gate_proj_up_proj"


@pytest.mark.parametrize(
    ("layers", "axis", "reason"),
    [
        ("*.experts.up_proj: {experts_ff1_3: bfp4}", "in", "formats bfp4, bfp8"),
        ("", "out", "blocks along out would span two of them"),
    ],
)
def test_what_cannot_be_one_stays_apart_with_a_note(layers: str, axis: str, reason: str) -> None:
    precision = precision_of("bfp8", layers=layers, block_axis=axis)
    graph_module, ctx = lowered(make(), until=NAME, target="cuda", precision=precision)
    assert merge_expert_linears(graph_module, ctx) == 0
    path = "model.layers.0.mlp.experts"
    assert f"not merged: {path}.gate_proj, {path}.up_proj ({reason})" in ctx.notes


def other_experts(x: Tensor, positions: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    experts = torch.stack((positions % 3, positions % 2), -1)
    gated = ops.expert_linear(x, gate, experts)
    return ops.swiglu(gated, ops.expert_linear(x, up, experts + 1)).flatten(1)


def one_input_each(x: Tensor, positions: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    experts = torch.stack((positions % 3, positions % 2), -1)
    gated = ops.expert_linear(x, gate, experts)
    return ops.swiglu(gated, ops.expert_linear(x + x, up, experts)).flatten(1)


def one_is_read_again(x: Tensor, positions: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    experts = torch.stack((positions % 3, positions % 2), -1)
    gated = ops.expert_linear(x, gate, experts)
    return (ops.swiglu(gated, ops.expert_linear(x, up, experts)) + gated).flatten(1)


@pytest.mark.parametrize("function", [other_experts, one_input_each, one_is_read_again])
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, gate=(4, 8, 32), up=(4, 8, 32))
    assert merge_expert_linears(graph_module, context_of(model)) == 0
