"""Rotations that are nearly, but not, the half-split one over whole heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiler.passes.match_rope import match_rope
from tests.tiny import context_of, function_graph, run_graph, step_inputs


def angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    turned = positions.float().unsqueeze(-1) * inv_freq
    return turned.cos().unsqueeze(1), turned.sin().unsqueeze(1)


def halves(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def flipped(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((cos * first - sin * second, first * sin + second * cos), dim=-1)


def other_way_round(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def exchanged_halves(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    second, first = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def two_sources(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    third, fourth = (x + 1).unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, fourth * cos + third * sin), dim=-1)


def two_frequencies(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, _ = angles(positions, inv_freq)
    _, sin = angles(positions, inv_freq * 2)
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("function", [halves, flipped])
def test_either_order_of_factors(function: object) -> None:
    graph_module, model = function_graph(function, inv_freq=(8,))  # type: ignore[arg-type]
    inputs = step_inputs(5)
    before = run_graph(graph_module, model, **inputs)
    assert match_rope(graph_module, context_of(model)) == 1
    after = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "function", [other_way_round, exchanged_halves, two_sources, two_frequencies]
)
def test_near_misses_are_left_alone(function: object) -> None:
    graph_module, model = function_graph(function, inv_freq=(8,))  # type: ignore[arg-type]
    assert match_rope(graph_module, context_of(model)) == 0
