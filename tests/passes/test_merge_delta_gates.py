"""The gates join the product beside them where nothing tells their weights apart."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_qwen3_5 import make
from tests.tiny import check_golden, lowered, precision_of, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.merge_delta_gates import merge_delta_gates
from tilewright.compiler.passes.runner import run_passes

NAME = "merge_delta_gates"


def test_a_models_numbers_stay_and_the_golden_text() -> None:
    model = make()
    precision = precision_of("bf16")
    graph_module, ctx = lowered(model, until=NAME, target="cuda", precision=precision)
    before = run_graph(graph_module, model, **step_inputs(9))
    count = len(find_calls(graph_module.graph, ops.gated_delta_rule))
    run_passes(graph_module, [merge_delta_gates], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == count > 0 and not ctx.notes
    torch.testing.assert_close(run_graph(graph_module, model, **step_inputs(9)), before)
    check_golden(f"passes/{NAME}_hybrid.txt", graph_text(graph_module.graph, layer=0))


def test_gates_are_the_last_rows() -> None:
    graph_module, _ = lowered(make(), target="cuda", precision=precision_of("bf16"))
    product = find_calls(graph_module.graph, ops.fused_linear)[0]
    recipe = info(product.args[1]).recipe  # type: ignore[arg-type]
    assert recipe is not None
    assert [each.part for each in recipe.segments[-2:]] == ["in_proj_a", "in_proj_b"]
    assert info(product).tensor_group == "delta_in"


@pytest.mark.parametrize(
    ("name", "layers"), [("bfp8", None), ("bf16", "*.in_proj_qkv: {li_qkv_decode: lofi}")]
)
def test_what_differs_stays_apart(name: str, layers: str | None) -> None:
    precision = precision_of(name, layers=layers) if layers else precision_of(name)
    graph_module, ctx = lowered(make(), until=NAME, target="cuda", precision=precision)
    products = len(find_calls(graph_module.graph, ops.linear))
    run_passes(graph_module, [merge_delta_gates], ctx)
    assert ctx.reports[-1].num_rewrites == 0
    assert len(find_calls(graph_module.graph, ops.linear)) == products


def test_it_leaves_other_models_alone() -> None:
    graph_module, ctx = lowered(tiny_model(), until=NAME, target="cuda")
    run_passes(graph_module, [merge_delta_gates], ctx)
    assert ctx.reports[-1].num_rewrites == 0
