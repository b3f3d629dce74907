"""Norms that are nearly, but not, ``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.match_rms_norm import match_rms_norm

REWRITE = """\
- %pow0: float32[T, 32] = aten.pow.Tensor_Scalar(%embedding0, 2)
- %mean0: float32[T, 1] = aten.mean.dim(%pow0, [-1], True)
- %add0: float32[T, 1] = aten.add.Tensor(%mean0, 1e-05)
- %rsqrt0: float32[T, 1] = aten.rsqrt.default(%add0)
- %mul1: float32[T, 32] = aten.mul.Tensor(%embedding0, %rsqrt0)
- %mul2: float32[T, 32] = aten.mul.Tensor(%mul1, input_layernorm)
- %linear0: float32[T, 64] = linear(%mul2, self_attn.q_proj)  {group=wqkv}
+ %rms_norm0: float32[T, 32] = rms_norm(%embedding0, input_layernorm, 1e-05)
+ %linear0: float32[T, 64] = linear(%rms_norm0, self_attn.q_proj)  {group=wqkv}
- %linear1: float32[T, 32] = linear(%mul2, self_attn.k_proj)  {group=wqkv}
+ %linear1: float32[T, 32] = linear(%rms_norm0, self_attn.k_proj)  {group=wqkv}
- %linear2: float32[T, 32] = linear(%mul2, self_attn.v_proj)  {group=wqkv}
+ %linear2: float32[T, 32] = linear(%rms_norm0, self_attn.v_proj)  {group=wqkv}
- %pow1: float32[T, 32] = aten.pow.Tensor_Scalar(%add3, 2)
- %mean1: float32[T, 1] = aten.mean.dim(%pow1, [-1], True)
- %add4: float32[T, 1] = aten.add.Tensor(%mean1, 1e-05)
- %rsqrt1: float32[T, 1] = aten.rsqrt.default(%add4)
- %mul11: float32[T, 32] = aten.mul.Tensor(%add3, %rsqrt1)
- %mul12: float32[T, 32] = aten.mul.Tensor(%mul11, post_attention_layernorm)
- %linear4: float32[T, 48] = linear(%mul12, mlp.gate_proj)  {group=ff1_3}
+ %rms_norm1: float32[T, 32] = rms_norm(%add3, post_attention_layernorm, 1e-05)
+ %linear4: float32[T, 48] = linear(%rms_norm1, mlp.gate_proj)  {group=ff1_3}
- %linear5: float32[T, 48] = linear(%mul12, mlp.up_proj)  {group=ff1_3}
+ %linear5: float32[T, 48] = linear(%rms_norm1, mlp.up_proj)  {group=ff1_3}
- %pow2: float32[T, 32] = aten.pow.Tensor_Scalar(%add5, 2)
- %mean2: float32[T, 1] = aten.mean.dim(%pow2, [-1], True)
- %add6: float32[T, 1] = aten.add.Tensor(%mean2, 1e-05)
- %rsqrt2: float32[T, 1] = aten.rsqrt.default(%add6)
- %mul14: float32[T, 32] = aten.mul.Tensor(%add5, %rsqrt2)
- %mul15: float32[T, 32] = aten.mul.Tensor(%mul14, norm)
- %linear7: float32[T, 61] = linear(%mul15, embed_tokens)  {group=lm_head}
+ %rms_norm2: float32[T, 32] = rms_norm(%add5, norm, 1e-05)
+ %linear7: float32[T, 61] = linear(%rms_norm2, embed_tokens)  {group=lm_head}"""


def norm(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def flipped(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return weight * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * x)


def other_axis(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5) * weight


def cubes(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5) * weight


def root(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def of_another(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    y = x + 1
    return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def scaled_eps(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(torch.add(mean, 1e-5, alpha=3)) * weight


def times_an_activation(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (x + weight)


@pytest.mark.parametrize("function", [norm, flipped])
def test_either_order_of_factors(function: object) -> None:
    graph_module, model = function_graph(function, weight=(32,))  # type: ignore[arg-type]
    inputs = step_inputs(4)
    before = run_graph(graph_module, model, **inputs)
    assert match_rms_norm(graph_module, context_of(model)) == 1
    (found,) = find_calls(graph_module.graph, ops.rms_norm)
    assert found.args[2] == 1e-5
    after = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "function", [other_axis, cubes, root, of_another, scaled_eps, times_an_activation]
)
def test_near_misses_are_left_alone(function: object) -> None:
    graph_module, model = function_graph(function, weight=(32,))  # type: ignore[arg-type]
    assert match_rms_norm(graph_module, context_of(model)) == 0
