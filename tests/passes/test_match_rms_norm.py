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
