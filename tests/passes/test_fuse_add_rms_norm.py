"""Sums that are no residual adds stay, and the sum stays readable."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tilewright.compiler.passes.match_rms_norm import match_rms_norm
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %add0: float32[T, 32] = aten.add.Tensor(%embedding0, %linear1)
- %rms_norm1: float32[T, 32] = rms_norm(%add0, post_attention_layernorm, 1e-05)
- %linear2: float32[T, 96] = linear(%rms_norm1, mlp.gate_proj_up_proj)  {group=ff1_3, weight=bfp8,
      fidelity=hifi2}
- %swiglu_packed0: float32[T, 48] = swiglu_packed(%linear2)
+ %add_rms_norm0: (float32[T, 32], float32[T, 32]) = add_rms_norm(%embedding0, %linear1,
      post_attention_layernorm, 1e-05)
+ %linear3: float32[T, 96] = linear(%add_rms_norm0.0, mlp.gate_proj_up_proj)  {group=ff1_3,
      weight=bfp8, fidelity=hifi2}
+ %swiglu_packed0: float32[T, 48] = swiglu_packed(%linear3)
- %add1: float32[T, 32] = aten.add.Tensor(%add0, %linear4)
- %rms_norm2: float32[T, 32] = rms_norm(%add1, norm, 1e-05)
- %linear5: float32[T, 61] = linear(%rms_norm2, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
- return %linear5
+ %add_rms_norm1: (float32[T, 32], float32[T, 32]) = add_rms_norm(%add_rms_norm0.1, %linear4,
      norm, 1e-05)
+ %linear6: float32[T, 61] = linear(%add_rms_norm1.0, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
+ return %linear6"""


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def of_a_difference(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return norm(x - x.sin(), weight)


def of_a_shift(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return norm(x + 1.0, weight)


def of_a_bias(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return norm(x + weight, weight)


def of_a_scaled_sum(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.add(x, x.sin(), alpha=2), weight)


@pytest.mark.parametrize("function", [of_a_difference, of_a_shift, of_a_bias, of_a_scaled_sum])
def test_near_misses_are_left_alone(function: object) -> None:
    graph_module, model = function_graph(function, weight=(32,))  # type: ignore[arg-type]
    ctx = context_of(model)
    assert match_rms_norm(graph_module, ctx) == 1
    assert fuse_add_rms_norm(graph_module, ctx) == 0


def test_the_sum_stays_for_its_other_readers() -> None:
    graph_module, ctx = lowered(tiny_model(num_layers=1), until="fuse_add_rms_norm")
    run_passes(graph_module, [fuse_add_rms_norm], ctx)
    first, last = find_calls(graph_module.graph, ops.add_rms_norm)
    residual = last.args[0]
    assert residual.target is operator.getitem  # type: ignore[union-attr]
    assert residual.args == (first, 1)  # type: ignore[union-attr]


def test_a_sum_with_two_norms_is_fused_once() -> None:
    def twice(x: Tensor, positions: Tensor, a: Tensor, b: Tensor) -> Tensor:
        total = x + x.sin()
        return norm(total, a) * norm(total, b)

    graph_module, model = function_graph(twice, a=(32,), b=(32,))
    ctx = context_of(model)
    run_passes(graph_module, [match_rms_norm], ctx)
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [fuse_add_rms_norm], ctx)
    assert [report.num_rewrites for report in ctx.reports] == [2, 1]
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)
