"""x * sigmoid(gate) becomes a gate, of all channels or each; other products stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.models.test_qwen3_5_moe import make
from tests.passes.rewrites import rewrite_text
from tests.tiny import context_of, lowered, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_matched
from tilewright.compiler.passes.match_calls import match_calls
from tilewright.compiler.passes.match_sigmoid_gate import match_sigmoid_gate
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %sigmoid0: float32[T, 64] = aten.sigmoid.default(%linear3)
- %mul0: float32[T, 64] = aten.mul.Tensor(%flatten0, %sigmoid0)
- %linear4: float32[T, 32] = linear(%mul0, self_attn.o_proj)  {group=wo}
+ %sigmoid_gate0: float32[T, 64] = sigmoid_gate(%flatten0, %linear3)
+ %linear4: float32[T, 32] = linear(%sigmoid_gate0, self_attn.o_proj)  {group=wo}
- %sigmoid1: float32[T, 1] = aten.sigmoid.default(%linear9)
- %mul1: float32[T, 32] = aten.mul.Tensor(%linear8, %sigmoid1)
- %add1: float32[T, 32] = aten.add.Tensor(%expert_linear2, %mul1)
+ %sigmoid_gate1: float32[T, 32] = sigmoid_gate(%linear8, %linear9)
+ %add1: float32[T, 32] = aten.add.Tensor(%expert_linear2, %sigmoid_gate1)"""


def of_each(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(x * w)


def of_all(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(torch.nn.functional.linear(x, w[None])) * x


@pytest.mark.parametrize("function", [of_each, of_all])
def test_it_fires(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, w=(32,))
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [match_calls, match_sigmoid_gate], context_of(model))
    assert len(find_calls(graph_module.graph, ops.sigmoid_gate)) == 1
    if function is of_each:
        verify_matched(graph_module)
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(5)), before)


def a_row_for_all(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(w)


def a_wider_gate(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x[:, :1] * torch.sigmoid(x * w)


def another_function(x: Tensor, positions: Tensor, w: Tensor) -> Tensor:
    return x * torch.tanh(x * w) + torch.sigmoid(x)


@pytest.mark.parametrize("function", [a_row_for_all, a_wider_gate, another_function])
def test_others_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, w=(32,))
    assert match_sigmoid_gate(graph_module, context_of(model)) == 0


def test_a_models_numbers_stay_and_the_rewrite_is_expected() -> None:
    model = make()
    graph_module, ctx = lowered(model, until="match_sigmoid_gate", target="reference")
    before = run_graph(graph_module, model, **step_inputs(9))
    text = graph_text(graph_module.graph, layer=3)
    run_passes(graph_module, [match_sigmoid_gate], ctx)
    assert ctx.reports[-1].num_rewrites == 5
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=3)) == REWRITE
