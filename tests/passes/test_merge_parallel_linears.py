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

REWRITE = """\
- self_attn.q_proj: float32[64, 32] = weight  {group=wqkv, format=bfp8}
- self_attn.k_proj: float32[32, 32] = weight  {group=wqkv, format=bfp8}
- self_attn.v_proj: float32[32, 32] = weight  {group=wqkv, format=bfp8}
+ self_attn.q_proj_k_proj_v_proj: float32[128, 32] = weight  {group=wqkv, format=bfp8,
      parts=q|k|v}
- mlp.gate_proj: float32[48, 32] = weight  {group=ff1_3, format=bfp8}
- mlp.up_proj: float32[48, 32] = weight  {group=ff1_3, format=bfp8}
+ mlp.gate_proj_up_proj: float32[96, 32] = weight  {group=ff1_3, format=bfp8, parts=gate|up}
- %linear0: float32[T, 64] = linear(%rms_norm0, self_attn.q_proj)  {group=wqkv, weight=bfp8,
      fidelity=hifi2}
- %unflatten0: float32[T, 4, 16] = aten.unflatten.int(%linear0, -1, [-1, 16])
- %linear1: float32[T, 32] = linear(%rms_norm0, self_attn.k_proj)  {group=wqkv, weight=bfp8,
      fidelity=hifi2}
- %unflatten1: float32[T, 2, 16] = aten.unflatten.int(%linear1, -1, [-1, 16])
- %linear2: float32[T, 32] = linear(%rms_norm0, self_attn.v_proj)  {group=wqkv, weight=bfp8,
      fidelity=hifi2}
- %unflatten2: float32[T, 2, 16] = aten.unflatten.int(%linear2, -1, [-1, 16])
- %rope0: float32[T, 4, 16] = rope(%unflatten0, positions, rotary.inv_freq)
- %rope1: float32[T, 2, 16] = rope(%unflatten1, positions, rotary.inv_freq)
- %attention0: float32[T, 4, 16] = attention(%rope0, %rope1, %unflatten2, 0.25)  {group=kv_cache,
      weight=bfp8, fidelity=hifi2}
+ %linear3: float32[T, 128] = linear(%rms_norm0, self_attn.q_proj_k_proj_v_proj)  {group=wqkv,
      weight=bfp8, fidelity=hifi2}
+ %split_with_sizes0: (float32[T, 64], float32[T, 32], float32[T, 32]) =
      aten.split_with_sizes.default(%linear3, [64, 32, 32], -1)
+ %unflatten3: float32[T, 4, 16] = aten.unflatten.int(%split_with_sizes0.0, -1, [-1, 16])
+ %unflatten4: float32[T, 2, 16] = aten.unflatten.int(%split_with_sizes0.1, -1, [-1, 16])
+ %unflatten5: float32[T, 2, 16] = aten.unflatten.int(%split_with_sizes0.2, -1, [-1, 16])
+ %rope0: float32[T, 4, 16] = rope(%unflatten3, positions, rotary.inv_freq)
+ %rope1: float32[T, 2, 16] = rope(%unflatten4, positions, rotary.inv_freq)
+ %attention0: float32[T, 4, 16] = attention(%rope0, %rope1, %unflatten5, 0.25)  {group=kv_cache,
      weight=bfp8, fidelity=hifi2}
- %linear5: float32[T, 48] = linear(%rms_norm1, mlp.gate_proj)  {group=ff1_3, weight=bfp8,
      fidelity=hifi2}
- %linear6: float32[T, 48] = linear(%rms_norm1, mlp.up_proj)  {group=ff1_3, weight=bfp8,
      fidelity=hifi2}
- %swiglu0: float32[T, 48] = swiglu(%linear5, %linear6)
- %linear8: float32[T, 32] = linear(%swiglu0, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}
+ %linear7: float32[T, 96] = linear(%rms_norm1, mlp.gate_proj_up_proj)  {group=ff1_3, weight=bfp8,
      fidelity=hifi2}
+ %split_with_sizes1: (float32[T, 48], float32[T, 48]) = aten.split_with_sizes.default(%linear7,
      [48, 48], -1)
+ %swiglu1: float32[T, 48] = swiglu(%split_with_sizes1.0, %split_with_sizes1.1)
+ %linear8: float32[T, 32] = linear(%swiglu1, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}"""

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
