"""The sum over experts takes in what is added to it: the shared expert, then the residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.models import test_qwen3_5_moe, test_qwen3_moe
from tests.passes.rewrites import rewrite_text
from tests.tiny import context_of, lowered, precision_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.fuse_expert_sum import fuse_expert_sum
from tilewright.compiler.passes.runner import run_passes

REWRITE = {
    "qwen3_moe": """\
- %expert_linear0: float32[T, 32] = expert_linear(%fused_expert_linear0, mlp.experts.down_proj,
      %router0.1, %router0.0)  {group=experts_ff2, weight=bfp8, fidelity=hifi4}
- %add0: float32[T, 32] = aten.add.Tensor(%fused_linear0, %expert_linear0)
+ %fused_expert_linear1: float32[T, 32] = fused_expert_linear(%fused_expert_linear0,
      mlp.experts.down_proj, %router0.1, %router0.0, False, %fused_linear0, None, None)
      {group=experts_ff2, weight=bfp8, fidelity=hifi4}""",
    "qwen3_5_moe": """\
- %expert_linear0: float32[T, 32] = expert_linear(%fused_expert_linear0, mlp.experts.down_proj,
      %router0.1, %router0.0)  {group=experts_ff2, weight=bfp8, fidelity=hifi4}
- %sigmoid_gate0: float32[T, 32] = sigmoid_gate(%linear3, %split_with_sizes2.1)
- %add0: float32[T, 32] = aten.add.Tensor(%expert_linear0, %sigmoid_gate0)
- %add1: float32[T, 32] = aten.add.Tensor(%fused_linear0, %add0)
+ %fused_expert_linear1: float32[T, 32] = fused_expert_linear(%fused_expert_linear0,
      mlp.experts.down_proj, %router0.1, %router0.0, False, %fused_linear0, %linear3,
      %split_with_sizes2.1)  {group=experts_ff2, weight=bfp8, fidelity=hifi4}""",
}

MODELS = {"qwen3_moe": (test_qwen3_moe.make, 2), "qwen3_5_moe": (test_qwen3_5_moe.make, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_numbers_stay_and_the_rewrite_is_expected(name: str) -> None:
    """A rewrite an add: with a shared expert two a layer."""
    make, count = MODELS[name]
    model, precision = make(), precision_of("bfp8")
    graph_module, ctx = lowered(model, until="fuse_expert_sum", target="cuda", precision=precision)
    before = run_graph(graph_module, model, **step_inputs(9))
    text = graph_text(graph_module.graph, layer=1)
    run_passes(graph_module, [fuse_expert_sum], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == count
    got = run_graph(graph_module, model, **step_inputs(9))
    torch.testing.assert_close(got, before, atol=1e-5, rtol=1e-5)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=1)) == REWRITE[name]


def choice(positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack((positions % 3, positions % 2), -1), x[:, :2]


def plain(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x + ops.expert_linear(x, w, *choice(positions, x))


def the_other_way_round(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return ops.expert_linear(x, w, *choice(positions, x)) + x


def gated(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return ops.sigmoid_gate(x, x[:, :1]) + ops.expert_linear(x, w, *choice(positions, x))


@pytest.mark.parametrize("function", [plain, the_other_way_round, gated])
def test_it_fires(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, w=(4, 32, 32))
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [fuse_expert_sum], context_of(model))
    (call,) = find_calls(graph_module.graph, ops.fused_expert_linear)
    args = ops.FusedExpertArguments.of(call.args)
    assert (args.shared is not None) == (function is gated) == (args.residual is None)
    got = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(got, before, atol=1e-5, rtol=1e-5)


def read_again(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    product = ops.expert_linear(x, w, *choice(positions, x))
    return (x + product) * product


def without_weights(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    experts, _ = choice(positions, x)
    return x[:, None].expand(-1, 2, -1) + ops.expert_linear(x, w, experts)


def another_shape(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x[:1] + ops.expert_linear(x, w, *choice(positions, x))


@pytest.mark.parametrize("function", [read_again, without_weights, another_shape])
def test_near_misses_are_left_alone(function: Callable[..., Any]) -> None:
    graph_module, model = function_graph(function, w=(4, 32, 32))
    assert fuse_expert_sum(graph_module, context_of(model)) == 0
