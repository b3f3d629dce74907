"""Only whole rows of norms that nobody else reads are picked earlier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.gather_before_norm import gather_before_norm
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %rms_norm2: float32[T, 32] = rms_norm(%fused_linear2, norm, 1e-05)
- %index_select0: float32[R, 32] = aten.index_select.default(%rms_norm2, 0, logit_rows)
- %linear1: float32[R, 61] = linear(%index_select0, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
+ %index_select0: float32[R, 32] = aten.index_select.default(%fused_linear2, 0, logit_rows)
+ %rms_norm3: float32[R, 32] = rms_norm(%index_select0, norm, 1e-05)
+ %linear1: float32[R, 61] = linear(%rms_norm3, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}"""

Function = Callable[..., Tensor]
ROWS = torch.tensor([4, 0, 0, 2])


def norm(x: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.rms_norm(x, scale, 1e-2)
    return out


def read_twice(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    normed = norm(x, scale)
    return normed.index_select(0, positions) + normed


def columns(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x, scale).index_select(1, positions)


def columns_from_the_end(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x, scale).index_select(-1, positions)


def of_no_norm(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x, scale).sin().index_select(0, positions)


def of_a_vector(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(scale, scale).index_select(0, positions)


@pytest.mark.parametrize(
    "function", [read_twice, columns, columns_from_the_end, of_no_norm, of_a_vector]
)
def test_near_misses_are_left_alone(function: Function) -> None:
    graph_module, model = function_graph(function, scale=(32,))
    assert gather_before_norm(graph_module, context_of(model)) == 0


def rows(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x, scale).index_select(0, positions)


def rows_of_heads(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x.unflatten(-1, (1, 32)), scale).index_select(0, positions)


def rows_of_what_others_read(x: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    return norm(x, scale).index_select(0, positions) * x.index_select(0, positions).sin()


@pytest.mark.parametrize("function", [rows, rows_of_heads, rows_of_what_others_read])
def test_rows_are_picked_before_they_are_normed(function: Function) -> None:
    graph_module, model = function_graph(function, scale=(32,))
    inputs = step_inputs(5) | {"positions": ROWS}
    before = run_graph(graph_module, model, **inputs)
    assert len(before) == len(ROWS)
    ctx = context_of(model)
    run_passes(graph_module, [gather_before_norm], ctx)
    assert ctx.reports[-1].num_rewrites == 1
    assert ctx.reports[-1].op_changes == {}
    (normed,) = find_calls(graph_module.graph, ops.rms_norm)
    assert normed.args[0] in find_calls(graph_module.graph, torch.ops.aten.index_select.default)
    after = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)
