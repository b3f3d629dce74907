"""Only the two equal halves of one product, gate first, are packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, precision_of, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.passes.fuse_swiglu_packed import fuse_swiglu_packed
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %split_with_sizes1: (float32[T, 48], float32[T, 48]) = aten.split_with_sizes.default(%linear2,
      [48, 48], -1)
- %swiglu0: float32[T, 48] = swiglu(%split_with_sizes1.0, %split_with_sizes1.1)
- %linear3: float32[T, 32] = linear(%swiglu0, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}
+ %swiglu_packed0: float32[T, 48] = swiglu_packed(%linear2)
+ %linear3: float32[T, 32] = linear(%swiglu_packed0, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}"""


def exchanged(x: Tensor, positions: Tensor) -> Tensor:
    up, gate = x.split([16, 16], -1)
    return ops.swiglu(gate, up)


def thirds(x: Tensor, positions: Tensor) -> Tensor:
    gate, up, _ = x.split([8, 8, 16], -1)
    return ops.swiglu(gate, up)


def two_products(x: Tensor, positions: Tensor) -> Tensor:
    gate, _ = x.split([16, 16], -1)
    _, up = x.sin().split([16, 16], -1)
    return ops.swiglu(gate, up)


def by_rows(x: Tensor, positions: Tensor) -> Tensor:
    gate, up = x.t().split([16, 16], 0)
    return ops.swiglu(gate, up)


@pytest.mark.parametrize("function", [exchanged, thirds, two_products, by_rows])
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function)
    assert fuse_swiglu_packed(graph_module, context_of(model)) == 0


def test_halves_are_packed() -> None:
    def halves(x: Tensor, positions: Tensor) -> Tensor:
        gate, up = x.split([16, 16], -1)
        return ops.swiglu(gate, up)

    graph_module, model = function_graph(halves)
    assert fuse_swiglu_packed(graph_module, context_of(model)) == 1


def test_products_that_were_not_merged_keep_swiglu() -> None:
    precision = precision_of("bfp8", layers="*.gate_proj: {ff1_3: bfp4}")
    graph_module, ctx = lowered(tiny_model(), until="fuse_swiglu_packed", precision=precision)
    run_passes(graph_module, [fuse_swiglu_packed], ctx)
    assert ctx.reports[-1].num_rewrites == 0
