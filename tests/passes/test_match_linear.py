"""Only products with a weight, as torch's linear writes them, are linear."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tiny import context_of, function_graph
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.match_linear import match_linear


def test_other_products_are_left_alone() -> None:
    def product(x: Tensor, positions: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(0, 1), -1) @ x

    graph_module, model = function_graph(product)
    assert match_linear(graph_module, context_of(model)) == 0


def test_a_bias_is_kept() -> None:
    graph_module, model = function_graph(
        lambda x, positions, weight, bias: torch.nn.functional.linear(x, weight, bias),
        weight=(5, 32),
        bias=(5,),
    )
    assert match_linear(graph_module, context_of(model)) == 1
    (found,) = find_calls(graph_module.graph, ops.linear)
    assert len(found.args) == 3
