"""GELU in either form becomes ours; other activations stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny import context_of, function_graph, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.verify import verify_matched
from tilewright.compiler.passes.match_embedding import match_embedding
from tilewright.compiler.passes.match_gelu import match_gelu
from tilewright.compiler.passes.runner import run_passes


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_both_approximations(approximate: str) -> None:
    graph_module, model = function_graph(
        lambda x, positions: F.gelu(x, approximate=approximate) * x
    )
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [match_embedding, match_gelu], context_of(model))
    (found,) = find_calls(graph_module.graph, ops.gelu)
    assert found.args[1] == approximate
    verify_matched(graph_module)
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(5)), before)


def test_others_are_left_alone() -> None:
    def activations(x: Tensor, positions: Tensor) -> Tensor:
        return F.silu(x) + x.tanh() + x.sigmoid()

    graph_module, model = function_graph(activations)
    assert match_gelu(graph_module, context_of(model)) == 0
