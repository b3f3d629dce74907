"""Rotations that are nearly, but not, the half-split one over whole heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.match_rope import match_rope
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %to0: float32[T] = aten.to.dtype(positions, torch.float32)
- %unsqueeze0: float32[T, 1] = aten.unsqueeze.default(%to0, -1)
- %mul0: float32[T, 8] = aten.mul.Tensor(%unsqueeze0, rotary.inv_freq)
- %cos0: float32[T, 8] = aten.cos.default(%mul0)
- %unsqueeze1: float32[T, 1, 8] = aten.unsqueeze.default(%cos0, 1)
- %sin0: float32[T, 8] = aten.sin.default(%mul0)
- %unsqueeze2: float32[T, 1, 8] = aten.unsqueeze.default(%sin0, 1)
- %chunk0: (float32[T, 4, 8], float32[T, 4, 8]) = aten.chunk.default(%unflatten0, 2, -1)
- %mul1: float32[T, 4, 8] = aten.mul.Tensor(%chunk0.0, %unsqueeze1)
- %mul2: float32[T, 4, 8] = aten.mul.Tensor(%chunk0.1, %unsqueeze2)
- %sub0: float32[T, 4, 8] = aten.sub.Tensor(%mul1, %mul2)
- %mul3: float32[T, 4, 8] = aten.mul.Tensor(%chunk0.1, %unsqueeze1)
- %mul4: float32[T, 4, 8] = aten.mul.Tensor(%chunk0.0, %unsqueeze2)
- %add0: float32[T, 4, 8] = aten.add.Tensor(%mul3, %mul4)
- %cat0: float32[T, 4, 16] = aten.cat.default([%sub0, %add0], -1)
- %chunk1: (float32[T, 2, 8], float32[T, 2, 8]) = aten.chunk.default(%unflatten1, 2, -1)
- %mul5: float32[T, 2, 8] = aten.mul.Tensor(%chunk1.0, %unsqueeze1)
- %mul6: float32[T, 2, 8] = aten.mul.Tensor(%chunk1.1, %unsqueeze2)
- %sub1: float32[T, 2, 8] = aten.sub.Tensor(%mul5, %mul6)
- %mul7: float32[T, 2, 8] = aten.mul.Tensor(%chunk1.1, %unsqueeze1)
- %mul8: float32[T, 2, 8] = aten.mul.Tensor(%chunk1.0, %unsqueeze2)
- %add1: float32[T, 2, 8] = aten.add.Tensor(%mul7, %mul8)
- %cat1: float32[T, 2, 16] = aten.cat.default([%sub1, %add1], -1)
- %attention0: float32[T, 4, 16] = attention(%cat0, %cat1, %unflatten2, 0.25)  {group=kv_cache}
+ %rope0: float32[T, 4, 16] = rope(%unflatten0, positions, rotary.inv_freq)
+ %rope1: float32[T, 2, 16] = rope(%unflatten1, positions, rotary.inv_freq)
+ %attention0: float32[T, 4, 16] = attention(%rope0, %rope1, %unflatten2, 0.25)  {group=kv_cache}"""


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


def scaled(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    turned = positions.float().unsqueeze(-1) * inv_freq
    cos, sin = ((each * 1.5).unsqueeze(1) for each in (turned.cos(), turned.sin()))
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def scaled_cosines(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    cos = cos * 1.5
    first, second = x.unflatten(-1, (-1, 16)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def partial(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    turned, rest = x.unflatten(-1, (-1, 16)).split([6, 10], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    parts = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((parts, rest), dim=-1)


def last_channels(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    cos, sin = angles(positions, inv_freq)
    rest, turned = x.unflatten(-1, (-1, 16)).split([10, 6], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    parts = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rest, parts), dim=-1)


@pytest.mark.parametrize(("function", "pairs"), [(scaled, 8), (partial, 3), (last_channels, 3)])
def test_factors_and_the_first_channels_alone(function: object, pairs: int) -> None:
    graph_module, model = function_graph(function, inv_freq=(pairs,))  # type: ignore[arg-type]
    inputs = step_inputs(5)
    before = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [match_rope], context_of(model))
    (rope,) = find_calls(graph_module.graph, ops.rope)
    assert rope.args[3:] == ((False, 1.5) if function is scaled else ())
    width = rope.args[0].meta["val"].shape[-1]
    assert width == (16 if function is not last_channels else 6), "what turns is a piece there"
    after = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_a_factor_of_cosines_alone_is_none_of_the_rotation() -> None:
    graph_module, model = function_graph(scaled_cosines, inv_freq=(8,))
    assert match_rope(graph_module, context_of(model)) == 0
