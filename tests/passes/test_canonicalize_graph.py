"""Assertions, idle casts and aliases go; casts that change something stay."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, run_graph, step_inputs, tiny_model
from tilewright.compiler.passes.canonicalize_graph import canonicalize_graph
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.tracer import trace

aten = torch.ops.aten


def test_the_numbers_of_the_eager_module() -> None:
    model = tiny_model(std=0.2)
    inputs = step_inputs(9)
    weights = model.checkpoint.tensors | model.module.constants()
    with torch.no_grad():
        expected = torch.func.functional_call(
            model.module, weights, (inputs["tokens"], inputs["positions"])
        )
    graph_module = trace(model.module)
    run_passes(graph_module, [canonicalize_graph], context_of(model))
    got = run_graph(graph_module, model, **inputs)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_assertions_and_idle_nodes_go() -> None:
    def idle(x: Tensor, positions: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x.float().contiguous().clone(), 0.5, training=False)
        return y.detach() + 1

    graph_module, model = function_graph(idle)
    left = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    assert left == [aten.embedding.default, aten.add.Tensor]
    inputs = step_inputs(3)
    table = model.checkpoint.tensors["embed.weight"]
    expected = table[inputs["tokens"]] + 1
    assert torch.equal(run_graph(graph_module, model, **inputs), expected)


def test_casts_that_change_the_type_and_dropout_in_training_stay() -> None:
    def busy(x: Tensor, positions: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.half().float(), 0.5, training=True)

    graph_module, _ = function_graph(busy)
    left = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    assert left[0] == aten.embedding.default
    assert left[-1] == aten.dropout.default
    assert len(left) == 4
