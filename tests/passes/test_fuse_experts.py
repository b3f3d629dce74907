"""A router and its experts' products become one op; anything else in their place stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.expected_rewrites import expected_rewrites
from tests.function_graphs import function_graph
from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.models.test_qwen3_moe import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import (
    compiled,
    context_of,
    lowered,
    precision_of,
    run_graph,
    step_inputs,
)
from tilewright.compiler import ops
from tilewright.compiler.ir.cost import step_costs
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.fuse_experts import fuse_experts
from tilewright.compiler.passes.match_router import match_router
from tilewright.compiler.passes.match_swiglu import match_swiglu
from tilewright.compiler.passes.runner import run_passes
from tilewright.errors import CompileError

REWRITE = """\
- %router0: (float32[T, 2], int64[T, 2]) = router(%linear4, 2, True)
- %expert_linear0: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.gate_proj,
      %router0.1)  {group=experts_ff1_3, weight=bfp8, fidelity=hifi2}
- %expert_linear1: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.up_proj, %router0.1)
      {group=experts_ff1_3, weight=bfp8, fidelity=hifi2}
- %swiglu0: float32[T, 2, 24] = swiglu(%expert_linear0, %expert_linear1)
- %expert_linear2: float32[T, 32] = expert_linear(%swiglu0, mlp.experts.down_proj, %router0.1,
      %router0.0)  {group=experts_ff2, weight=bfp4, fidelity=lofi}
- %add1: float32[T, 32] = aten.add.Tensor(%add0, %expert_linear2)
+ %experts0: float32[T, 32] = experts(%rms_norm3, %linear4, mlp.experts.gate_proj,
      mlp.experts.up_proj, mlp.experts.down_proj, 2, True)
+ %add1: float32[T, 32] = aten.add.Tensor(%add0, %experts0)"""

SHAPES = {"router": (6, 32), "gate": (6, 24, 32), "up": (6, 24, 32), "down": (6, 32, 24)}


def choose(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(torch.softmax(x @ router.T, dim=-1), 2, dim=-1)
    return weights, experts


def block(x: Tensor, positions: Tensor, router: Tensor, **weights: Tensor) -> Tensor:
    shares, experts = choose(x, router)
    gate = F.silu(ops.expert_linear(x, weights["gate"], experts))
    inner = gate * ops.expert_linear(x, weights["up"], experts)
    return ops.expert_linear(inner, weights["down"], experts, shares)


def two_inputs(x: Tensor, positions: Tensor, router: Tensor, **weights: Tensor) -> Tensor:
    shares, experts = choose(x, router)
    gate = F.silu(ops.expert_linear(x, weights["gate"], experts))
    inner = gate * ops.expert_linear(x + 1, weights["up"], experts)
    return ops.expert_linear(inner, weights["down"], experts, shares)


def two_choices(x: Tensor, positions: Tensor, router: Tensor, **weights: Tensor) -> Tensor:
    shares, experts = choose(x, router)
    _, others = choose(x + 1, router)
    gate = F.silu(ops.expert_linear(x, weights["gate"], experts))
    inner = gate * ops.expert_linear(x, weights["up"], others)
    return ops.expert_linear(inner, weights["down"], experts, shares)


def another_activation(x: Tensor, positions: Tensor, router: Tensor, **weights: Tensor) -> Tensor:
    shares, experts = choose(x, router)
    gate = F.relu(ops.expert_linear(x, weights["gate"], experts))
    inner = gate * ops.expert_linear(x, weights["up"], experts)
    return ops.expert_linear(inner, weights["down"], experts, shares)


def not_summed(x: Tensor, positions: Tensor, router: Tensor, **weights: Tensor) -> Tensor:
    _, experts = choose(x, router)
    gate = F.silu(ops.expert_linear(x, weights["gate"], experts))
    inner = gate * ops.expert_linear(x, weights["up"], experts)
    return ops.expert_linear(inner, weights["down"], experts).sum(1)


def matched(function: Callable[..., Tensor]) -> tuple[Any, Any]:
    graph_module, model = function_graph(function, **SHAPES)
    run_passes(graph_module, [match_router, match_swiglu], context_of(model))
    return graph_module, model


def test_it_fires_and_the_numbers_stay() -> None:
    graph_module, model = matched(block)
    before = run_graph(graph_module, model, **step_inputs(7))
    run_passes(graph_module, [fuse_experts], context_of(model))
    (found,) = find_calls(graph_module.graph, ops.experts)
    assert found.args[-2:] == (2, False)
    assert not find_calls(graph_module.graph, ops.expert_linear, ops.router)
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(7)), before)


@pytest.mark.parametrize("function", [two_inputs, two_choices, another_activation, not_summed])
def test_others_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = matched(function)
    before = graph_text(graph_module.graph)
    assert fuse_experts(graph_module, context_of(model)) == 0
    assert graph_text(graph_module.graph) == before


def test_a_models_numbers_stay_and_the_rewrite_is_expected() -> None:
    model = make()
    precision = precision_of("bfp8", "hifi2", ff2="bfp4", li_ff2="lofi")
    graph_module, ctx = lowered(model, until="fuse_experts", precision=precision)
    before = run_graph(graph_module, model, **step_inputs(9))
    asked = {"num_tokens": 3, "context": 8}
    costs = {each.group: each for each in step_costs(graph_module, **asked)}
    text = graph_text(graph_module.graph, layer=1)
    run_passes(graph_module, [fuse_experts], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == 2
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=1)) == REWRITE
    after = {each.group: each for each in step_costs(graph_module, **asked)}
    for group in ("experts_ff1_3", "experts_ff2"):
        assert after[group] == costs[group], "weights and products stay in their groups"


@pytest.mark.parametrize("make", [make, make_hybrid])
def test_it_fires_as_often_as_the_module_says(make: Callable[[], Any]) -> None:
    model = make()
    _, ctx = lowered(model)
    found = {report.name: report.num_rewrites for report in ctx.reports}
    assert found["fuse_experts"] == expected_rewrites(model.config)["fuse_experts"] > 0


def test_a_product_without_a_fidelity_is_refused() -> None:
    graph_module, _ = lowered(make())
    block = find_calls(graph_module.graph, ops.experts)[1]
    down = block.args[4]
    assert info(down).op_group == "li_ff2"  # type: ignore[arg-type]
    set_info(down, compute=None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"1\.mlp\.experts\.down_proj\.weight: no fidelity"):
        verify_precision(graph_module)


def test_phases_that_come_to_different_arithmetic_are_refused() -> None:
    precision = precision_of("bfp8", "hifi2", li_ff2_prefill="hifi4")
    with pytest.raises(CompileError, match=r"0\.mlp\.experts\.down_proj\.weight: li_ff2 is hifi4"):
        compiled(make(), "cpu", precision=precision, compute="fast")
