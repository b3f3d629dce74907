"""Softmax and top-k become a router, with or without the weights' normalisation; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.models.test_qwen3_moe import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import context_of, lowered, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.passes.match_calls import match_calls
from tilewright.compiler.passes.match_router import match_router
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %softmax0: float32[T, 6] = aten.softmax.int(%linear4, -1)
- %topk0: (float32[T, 2], int64[T, 2]) = aten.topk.default(%softmax0, 2)
- %sum0: float32[T, 1] = aten.sum.dim_IntList(%topk0.0, [-1], True)
- %div0: float32[T, 2] = aten.div.Tensor(%topk0.0, %sum0)
- %expert_linear0: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.gate_proj, %topk0.1)
      {group=experts_ff1_3}
- %expert_linear1: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.up_proj, %topk0.1)
      {group=experts_ff1_3}
+ %router0: (float32[T, 2], int64[T, 2]) = router(%linear4, 2, True)
+ %expert_linear0: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.gate_proj,
      %router0.1)  {group=experts_ff1_3}
+ %expert_linear1: float32[T, 2, 24] = expert_linear(%rms_norm3, mlp.experts.up_proj, %router0.1)
      {group=experts_ff1_3}
- %expert_linear2: float32[T, 32] = expert_linear(%swiglu0, mlp.experts.down_proj, %topk0.1,
      %div0)  {group=experts_ff2}
- %add1: float32[T, 32] = aten.add.Tensor(%add0, %expert_linear2)
+ %expert_linear3: float32[T, 32] = expert_linear(%swiglu0, mlp.experts.down_proj, %router0.1,
      %router0.0)  {group=experts_ff2}
+ %add1: float32[T, 32] = aten.add.Tensor(%add0, %expert_linear3)"""


def routed(x: Tensor, *, renormalise: bool, k: int = 3) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(torch.softmax(x, dim=-1), k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, experts


@pytest.mark.parametrize("renormalise", [False, True])
def test_it_fires(renormalise: bool) -> None:
    def weigh(x: Tensor, positions: Tensor, stack: Tensor) -> Tensor:
        weights, experts = routed(x, renormalise=renormalise)
        return ops.expert_linear(x, stack, experts, weights)

    graph_module, model = function_graph(weigh, stack=(32, 4, 32))
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [match_calls, match_router], context_of(model))
    (found,) = find_calls(graph_module.graph, ops.router)
    assert found.args[1:] == (3, renormalise)
    assert not find_calls(graph_module.graph, torch.ops.aten.topk.default)
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(5)), before)


def sorted_only(x: Tensor, positions: Tensor) -> Tensor:
    return torch.topk(x, 3, dim=-1)[0]


def of_columns(x: Tensor, positions: Tensor) -> Tensor:
    return torch.topk(torch.softmax(x, dim=0), 3, dim=-1)[0]


def smallest(x: Tensor, positions: Tensor) -> Tensor:
    return torch.topk(torch.softmax(x, dim=-1), 3, dim=-1, largest=False)[0]


@pytest.mark.parametrize("function", [sorted_only, of_columns, smallest])
def test_others_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function)
    assert match_router(graph_module, context_of(model)) == 0


def test_weights_that_are_read_twice_are_not_taken_for_normalised() -> None:
    def both(x: Tensor, positions: Tensor, stack: Tensor) -> Tensor:
        weights, experts = routed(x, renormalise=False)
        shares = weights / weights.sum(-1, keepdim=True)
        return ops.expert_linear(x, stack, experts, weights + shares)

    graph_module, model = function_graph(both, stack=(32, 4, 32))
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [match_calls, match_router], context_of(model))
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(5)), before)


def test_a_models_numbers_stay_and_the_rewrite_is_expected() -> None:
    model = make()
    graph_module, ctx = lowered(model, until="match_router", target="reference")
    before = run_graph(graph_module, model, **step_inputs(9))
    text = graph_text(graph_module.graph, layer=1)
    run_passes(graph_module, [match_router], ctx)
    assert ctx.reports[-1].num_rewrites == 2
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=1)) == REWRITE
