"""Only a head that is a product is given rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.gather_logit_rows import gather_logit_rows
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
+ logit_rows: int64[R] = input
- %linear4: float32[T, 61] = linear(%add_rms_norm1.0, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
- return %linear4
+ %index_select0: float32[R, 32] = aten.index_select.default(%add_rms_norm1.0, 0, logit_rows)
+ %linear5: float32[R, 61] = linear(%index_select0, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
+ return %linear5"""


def test_an_output_that_is_no_product_is_left_alone() -> None:
    def normed(x: Tensor, positions: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
        out: Tensor = ops.rms_norm(ops.linear(x, weight), norm, 1e-5)
        return out

    def doubled(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = ops.linear(x, weight)
        return out * ops.linear(x, weight)

    for graph_module, model in (
        function_graph(normed, weight=(5, 32), norm=(5,)),
        function_graph(doubled, weight=(5, 32)),
    ):
        assert gather_logit_rows(graph_module, context_of(model)) == 0


def test_logits_may_be_capped_before_they_are_put_out() -> None:
    def capped(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = ops.linear(x, weight)
        return (out / 30.0).tanh() * 30.0

    graph_module, model = function_graph(capped, weight=(5, 32))
    inputs = step_inputs(6)
    every = run_graph(graph_module, model, **inputs)
    assert gather_logit_rows(graph_module, context_of(model)) == 1
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    assert output.args[0].meta["val"].shape[1] == 5
    assert str(find_calls(graph_module.graph, ops.linear)[0].args[0]).startswith("index_select")
    some = run_graph(graph_module, model, **inputs | {"logit_rows": torch.tensor([5, 0])})
    torch.testing.assert_close(some, every[[5, 0]], atol=1e-6, rtol=1e-6)


def test_rows_are_those_asked_for_in_their_order() -> None:
    model = tiny_model(num_layers=1, std=0.2)
    graph_module, ctx = lowered(model, until="gather_logit_rows")
    inputs = step_inputs(6)
    every = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [gather_logit_rows], ctx)
    rows = torch.tensor([5, 0, 3])
    some = run_graph(graph_module, model, **inputs | {"logit_rows": rows})
    torch.testing.assert_close(some, every[rows], atol=1e-6, rtol=1e-6)


def test_a_bias_of_the_head_is_kept() -> None:
    graph_module, model = function_graph(
        lambda x, positions, weight, bias: ops.linear(x, weight, bias), weight=(5, 32), bias=(5,)
    )
    assert gather_logit_rows(graph_module, context_of(model)) == 1
    (head,) = find_calls(graph_module.graph, ops.linear)
    assert str(head.args[2]) == "bias"
