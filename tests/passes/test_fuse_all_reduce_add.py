"""The residual add behind a sum over ranks, and the norm where products alone read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.fuse_all_reduce_add import fuse_all_reduce_add
from tilewright.compiler.passes.runner import run_passes

Function = Callable[..., Tensor]


def reduced(x: Tensor) -> Tensor:
    out: Tensor = ops.all_reduce(x.sin(), 1, "fp32")
    return out


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.linear(x, weight)
    return out


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.rms_norm(x, weight, 1e-5)
    return out


def without_a_norm(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    return (x + reduced(x)).cos()


def with_a_norm(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    total = reduced(x) + x
    normed = norm_of(total, norm)
    return product_of(normed, weight) + product_of(normed, weight.sin()) + total


def with_another_reader(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    normed = norm_of(x + reduced(x), norm)
    return product_of(normed, weight) + normed


def with_two_norms(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    total = x + reduced(x)
    return product_of(norm_of(total, norm), weight) + norm_of(total, norm)


@pytest.mark.parametrize(
    ("function", "norms"),
    [
        (without_a_norm, 0),
        (with_a_norm, -1),
        (with_another_reader, 0),
        (with_two_norms, 0),
    ],
)
def test_the_add_moves_inside(function: Function, norms: int) -> None:
    graph_module, model = function_graph(function, weight=(32, 32), norm=(32,))
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [fuse_all_reduce_add], ctx)
    assert ctx.reports[-1].num_rewrites == 1
    assert len(find_calls(graph_module.graph, ops.all_reduce_add)) == 1
    assert not find_calls(graph_module.graph, ops.all_reduce)
    assert ctx.reports[-1].op_changes.get("rms_norm", 0) == norms
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def read_twice(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    total = reduced(x)
    return (x + total) * total


def a_difference(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    return x - reduced(x)


def one_row(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    return weight[0] + reduced(x)


@pytest.mark.parametrize("function", [read_twice, a_difference, one_row])
def test_near_misses_are_left_alone(function: Function) -> None:
    graph_module, model = function_graph(function, weight=(32, 32), norm=(32,))
    assert fuse_all_reduce_add(graph_module, context_of(model)) == 0
