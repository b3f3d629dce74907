"""What is merged, what is not and why, and that merging never changes a weight's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.tiny import lowered, precision_of, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.merge_parallel_linears import merge_parallel_linears
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import PrecisionConfig

NAME = "merge_parallel_linears"


def merged(precision: PrecisionConfig, **changes: Any) -> tuple[GraphModule, PassContext, int]:
    graph_module, ctx = lowered(tiny_model(**changes), until=NAME, precision=precision)
    run_passes(graph_module, [merge_parallel_linears], ctx)
    return graph_module, ctx, ctx.reports[-1].num_rewrites


def test_merged_weights_keep_their_parts() -> None:
    graph_module, ctx, count = merged(precision_of("bfp8"), num_layers=1)
    assert (count, ctx.notes) == (2, [])
    recipes = {info(n).fqn: info(n).recipe for n in graph_module.graph.nodes if info(n).recipe}
    qkv = recipes["model.layers.0.self_attn.q_proj_k_proj_v_proj.weight"]
    assert qkv is not None
    assert [(s.part, s.num_rows) for s in qkv.segments] == [("q", 64), ("k", 32), ("v", 32)]
    assert qkv.shape == (128, 32)
    gate_up = recipes["model.layers.0.mlp.gate_proj_up_proj.weight"]
    assert gate_up is not None
    assert [segment.part for segment in gate_up.segments] == ["gate", "up"]


def test_merged_parts_are_gone_from_the_inputs() -> None:
    graph_module, _, _ = merged(precision_of("bfp8"))
    names = {info(node).fqn for node in graph_module.graph.nodes if node.op == "placeholder"}
    assert not {name for name in names if name.endswith((".q_proj.weight", ".up_proj.weight"))}


def test_biases_are_merged() -> None:
    graph_module, _, count = merged(precision_of("bfp8"), num_layers=1, attention_bias=True)
    assert count == 2
    product = find_calls(graph_module.graph, ops.linear)[0]
    bias = info(product.args[2])  # type: ignore[arg-type]
    assert bias.fqn == "model.layers.0.self_attn.q_proj_k_proj_v_proj.bias"
    assert bias.recipe is not None
    assert bias.recipe.shape == (128,)
    assert bias.recipe.format == "fp32"


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        (
            "*.q_proj: {wqkv: bfp4}",
            "q_proj, {}.self_attn.k_proj, {}.self_attn.v_proj (formats bfp4, bfp8)",
        ),
        (
            "*.k_proj: {li_qkv_decode: lofi}",
            "q_proj, {}.self_attn.k_proj, {}.self_attn.v_proj (unequal fidelities)",
        ),
    ],
)
def test_unequal_parts_stay_apart_and_are_reported(rule: str, note: str) -> None:
    graph_module, ctx, count = merged(precision_of("bfp8", layers=rule))
    assert count == 2, "gate and up of both layers"
    assert ctx.notes == [
        f"not merged: {layer}.self_attn." + note.replace("{}", layer)
        for layer in ("model.layers.0", "model.layers.1")
    ]
    assert len(find_calls(graph_module.graph, ops.linear)) == 2 * (3 + 1 + 1 + 1) + 1


def test_one_unequal_layer_leaves_the_others_merged() -> None:
    _, ctx, count = merged(precision_of("bfp8", layers="0: {ff1_3: bfp4}"))
    assert (count, ctx.notes) == (4, []), "a whole layer's gate and up are equal to each other"


def test_a_bias_of_some_keeps_them_apart() -> None:
    graph_module, ctx = lowered(tiny_model(num_layers=1, attention_bias=True), until=NAME)
    product = find_calls(graph_module.graph, ops.linear)[1]
    product.args = product.args[:2]
    assert merge_parallel_linears(graph_module, ctx) == 1
    assert ctx.notes[0].endswith("(only some have a bias)")


def test_products_of_different_inputs_stay_apart() -> None:
    """The down projections of two layers are of one group, and of two inputs."""
    graph_module, _, _ = merged(precision_of("bfp8"))
    names = [info(node).fqn for node in find_calls(graph_module.graph, ops.linear)]
    assert [name for name in names if "down" in name] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]


@pytest.mark.parametrize(("inner", "num_merged"), [(48, 2), (40, 1)])
def test_blocks_along_out_never_span_two_parts(inner: int, num_merged: int) -> None:
    """A block of 16 rows that is half gate, half up would have other values than both alone."""
    model = tiny_model(num_layers=1, intermediate_size=inner, std=0.2)
    precision = precision_of("bfp4", block_axis="out", ff2="fp32")
    graph_module, ctx = lowered(model, until=NAME, precision=precision)
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [merge_parallel_linears], ctx)
    assert ctx.reports[-1].num_rewrites == num_merged
    assert len(ctx.notes) == 2 - num_merged
    assert all("blocks along out" in note for note in ctx.notes)
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_blocks_along_in_are_merged_whatever_the_sizes() -> None:
    _, ctx, count = merged(precision_of("bfp4"), num_layers=1, intermediate_size=40)
    assert (count, ctx.notes) == (2, [])
