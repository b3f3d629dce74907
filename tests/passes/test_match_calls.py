"""Calls that are ours under another name become ours; whatever is written another way stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.verify import verify_matched
from tilewright.compiler.passes.match_calls import match_calls
from tilewright.compiler.passes.runner import run_passes

Function = Callable[..., Tensor]


def product(x: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def gelu(x: Tensor, positions: Tensor) -> Tensor:
    return F.gelu(x) * x


def gelu_of_tanh(x: Tensor, positions: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") * x


def look_up(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return x + F.embedding(positions, table)


@pytest.mark.parametrize(
    ("function", "shapes", "operation", "arguments"),
    [
        (
            product,
            {"weight": (5, 32), "bias": (5,)},
            ops.linear,
            ["embedding_default", "weight", "bias"],
        ),
        (gelu, {}, ops.gelu, ["embedding_default", "none"]),
        (gelu_of_tanh, {}, ops.gelu, ["embedding_default", "tanh"]),
        (look_up, {"table": (64, 32)}, ops.embedding, ["positions", "table"]),
    ],
)
def test_it_fires_and_the_numbers_stay(
    function: Function,
    shapes: dict[str, tuple[int, ...]],
    operation: ops.Operator,
    arguments: list[str],
) -> None:
    """The helper's own embedding is matched besides."""
    graph_module, model = function_graph(function, **shapes)
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [match_calls], ctx)
    assert ctx.reports[-1].num_rewrites == 2
    assert [str(each) for each in find_calls(graph_module.graph, operation)[-1].args] == arguments
    if operation is not ops.embedding:
        verify_matched(graph_module)
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(5)), before)


def product_of_states(x: Tensor, positions: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(0, 1), -1) @ x


def other_activations(x: Tensor, positions: Tensor) -> Tensor:
    return F.silu(x) + x.tanh() + x.sigmoid()


def picked_rows(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return x + table.index_select(0, positions)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(product_of_states, {}), (other_activations, {}), (picked_rows, {"table": (256, 32)})],
)
def test_others_are_left_alone(function: Function, shapes: dict[str, tuple[int, ...]]) -> None:
    graph_module, model = function_graph(function, **shapes)
    assert match_calls(graph_module, context_of(model)) == 1, "the helper's own embedding"
    (found,) = find_calls(graph_module.graph, ops.embedding)
    assert [str(node.target) for node in found.all_input_nodes] == ["tokens", "embed_weight"]
