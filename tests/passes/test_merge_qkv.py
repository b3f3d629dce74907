"""q, k and v become one product; gate and up, and whatever else shares an input, stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.function_graphs import function_graph
from tests.passes.rewrites import rewrite_text
from tests.tiny import (
    QWEN2,
    check_golden,
    context_of,
    lowered,
    precision_of,
    run_graph,
    step_inputs,
    tiny_model,
)
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.passes.merge_qkv import merge_qkv
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import PrecisionConfig

REWRITE = """\
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
      weight=bfp8, fidelity=hifi2}"""

NAME = "merge_qkv"


def given(precision: PrecisionConfig, **changes: Any) -> tuple[GraphModule, PassContext]:
    return lowered(tiny_model(**changes), target="n150", until=NAME, precision=precision)


@pytest.mark.parametrize("architecture", [{}, QWEN2], ids=["llama", "qwen2"])
def test_it_fires_once_a_layer(architecture: dict[str, Any]) -> None:
    graph_module, ctx = given(precision_of("bfp8"), num_layers=3, **architecture)
    run_passes(graph_module, [merge_qkv], ctx)
    assert (ctx.reports[-1].num_rewrites, ctx.notes) == (3, [])
    names = [
        info(node).fqn.rpartition(".")[2] for node in find_calls(graph_module.graph, ops.linear)
    ]
    a_layer = ["q_proj_k_proj_v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert names == [*a_layer * 3, "lm_head"]
    assert merge_qkv(graph_module, ctx) == 0, "nothing the second time"


def test_gate_and_up_are_left_alone() -> None:
    """Without a word: that they were not merged is no fault of the configuration."""
    rule = "0: {li_ff1_3: lofi}, *.up_proj: {ff1_3: bfp4}"
    graph_module, ctx = given(precision_of("bfp8", layers=rule))
    assert merge_qkv(graph_module, ctx) == 2
    assert ctx.notes == []


def test_unequal_parts_are_left_alone_and_reported() -> None:
    graph_module, ctx = given(precision_of("bfp8", layers="*.1.*.v_proj: {wqkv: bfp4}"))
    before = len(find_calls(graph_module.graph, ops.linear))
    assert merge_qkv(graph_module, ctx) == 1
    assert len(find_calls(graph_module.graph, ops.linear)) == before - 2
    path = "model.layers.1.self_attn"
    assert ctx.notes == [
        f"not merged: {path}.q_proj, {path}.k_proj, {path}.v_proj (formats bfp4, bfp8)"
    ]


def test_a_graph_without_a_decoder_is_left_alone() -> None:
    graph_module, model = function_graph(lambda x, positions: (x + 1).exp() * 2)
    before = graph_text(graph_module.graph)
    assert merge_qkv(graph_module, context_of(model)) == 0
    assert graph_text(graph_module.graph) == before


@pytest.mark.parametrize("bias", [False, True])
def test_the_numbers_stay(bias: bool) -> None:
    model = tiny_model(attention_bias=bias, std=0.2)
    graph_module, ctx = lowered(model, target="n150", until=NAME, precision=precision_of("bfp8"))
    inputs = step_inputs(9)
    before = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [merge_qkv], ctx)
    after = run_graph(graph_module, model, **inputs)
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_the_rewrite_is_expected() -> None:
    graph_module, ctx = given(precision_of("bfp8", "hifi2"))
    text = graph_text(graph_module.graph, layer=0)
    run_passes(graph_module, [merge_qkv], ctx)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=0)) == REWRITE


def test_a_layer_of_the_boards_pipeline() -> None:
    graph_module, _ = lowered(
        tiny_model(), target="n150", precision=precision_of("bfp8", "hifi2", embedding="bf16")
    )
    check_golden(
        "passes/board_pipeline_layer_merge_qkv.txt", graph_text(graph_module.graph, layer=0)
    )
