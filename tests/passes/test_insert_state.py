"""Caches carry their specification; graphs without attention get none."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.tiny import context_of, lowered, precision_of, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import STATE, info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.passes.insert_state import insert_state
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
+ cu_seqlens: int64[N+1] = input
+ slots: int64[N] = input
+ self_attn.kv: float32[S, 2, L, 2, 16] = state  {group=kv_cache, format=bfp8 per_token}
- %attention0: float32[T, 4, 16] = attention(%rope0, %rope1, %unflatten2, 0.25)  {group=kv_cache,
      weight=bfp8, fidelity=hifi2}
- %flatten0: float32[T, 64] = aten.flatten.using_ints(%attention0, -2)
+ %attention_step0: float32[T, 4, 16] = attention_step(%rope0, %rope1, %unflatten2, self_attn.kv,
      positions, cu_seqlens, slots, 0.25, 0)  {group=kv_cache, weight=bfp8, fidelity=hifi2}
+ %flatten0: float32[T, 64] = aten.flatten.using_ints(%attention_step0, -2)"""


def test_a_graph_without_attention_is_left_alone() -> None:
    graph_module, model = function_graph(lambda x, positions: x + 1)
    before = [node.name for node in graph_module.graph.nodes]
    assert insert_state(graph_module, context_of(model)) == 0
    assert [node.name for node in graph_module.graph.nodes] == before


def test_every_layer_gets_its_specification() -> None:
    precision = precision_of("bfp8", kv_cache="bfp8", layers="1: {kv_cache: bf16}")
    graph_module, ctx = lowered(tiny_model(), until="insert_state", precision=precision)
    run_passes(graph_module, [insert_state], ctx)
    states = [info(node) for node in graph_module.graph.nodes if info(node).role == STATE]
    assert [facts.state for facts in states] == [
        StateSpec(f"model.layers.{layer}.self_attn.kv", PER_TOKEN, (2, 2, 16), name)
        for layer, name in enumerate(("bfp8", "bf16"))
    ]
    assert [facts.layer for facts in states] == [0, 1]


def test_values_have_their_own_format_in_a_layer() -> None:
    precision = precision_of("bfp8", kv_cache="bfp8", layers="1: {v_cache: bfp4}")
    graph_module, ctx = lowered(tiny_model(), until="insert_state", precision=precision)
    run_passes(graph_module, [insert_state], ctx)
    states = [info(node).state for node in graph_module.graph.nodes if info(node).role == STATE]
    formats = [(state.format, state.value_format) for state in states if state is not None]
    assert formats == [("bfp8", ""), ("bfp8", "bfp4")]


def test_steps_share_their_inputs() -> None:
    graph_module, ctx = lowered(tiny_model(), until="insert_state")
    run_passes(graph_module, [insert_state], ctx)
    steps = find_calls(graph_module.graph, ops.attention_step)
    assert len(steps) == 2
    assert [str(arg) for arg in steps[0].args[4:7]] == ["positions", "cu_seqlens", "slots"]
    assert steps[0].args[4:7] == steps[1].args[4:7]
    assert steps[0].args[3] is not steps[1].args[3]


def test_a_window_reaches_the_specification_and_the_step() -> None:
    def windowed(x: Tensor, positions: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 16))
        out: Tensor = ops.attention(heads, heads, heads, 0.25, 6)
        return out.flatten(-2)

    graph_module, model = function_graph(windowed)
    assert insert_state(graph_module, context_of(model)) == 1
    (step,) = find_calls(graph_module.graph, ops.attention_step)
    assert step.args[-2:] == (0.25, 6)
    facts = info(step.args[3])  # type: ignore[arg-type]
    assert facts.state is not None
    assert (facts.state.window, facts.state.shape) == (6, (2, 2, 16))
    assert step.meta["val"].dtype == torch.float32


def test_layers_that_forget_get_a_state_of_one_size() -> None:
    graph_module, ctx = lowered(make_hybrid(), until="insert_state", target="reference")
    run_passes(graph_module, [insert_state], ctx)
    states = [info(node).state for node in graph_module.graph.nodes if info(node).role == STATE]
    assert [each.name.rpartition(".")[2] for each in states if each] == [
        *["window", "memory"] * 3,
        "kv",
    ]
    path = "model.layers.0.linear_attn"
    assert states[:2] == [
        StateSpec(f"{path}.conv1d.window", PER_SEQUENCE, (128, 3), "fp32"),
        StateSpec(f"{path}.memory", PER_SEQUENCE, (4, 16, 16), "fp32"),
    ]
    assert states[0] is not None and states[0].num_elements(1000) == 128 * 3
    text = graph_text(graph_module.graph)
    assert f"{path}.memory: float32[S, 4, 16, 16] = state" in text
