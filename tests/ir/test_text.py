"""The text of a graph: stable, without addresses, and told apart by what matters."""

from __future__ import annotations

import re

from tests.tiny import context_of, lowered, pipeline, precision_of, tiny_model
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.text import graph_text, operator_name
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.tracer import trace


def test_the_text_is_the_same_every_time() -> None:
    texts = set()
    for _ in range(2):
        model = tiny_model(num_layers=1)
        graph_module = trace(model.module)
        run_passes(graph_module, pipeline(), context_of(model, precision_of("bfp8")))
        texts.add(graph_text(graph_module.graph))
    assert len(texts) == 1
    text = texts.pop()
    assert not re.search(r"0x[0-9a-f]{4,}|\bs\d+\b", text), "an address or a symbol's number"


def test_dimensions_are_named_after_the_inputs_that_bring_them() -> None:
    lines = graph_text(lowered(tiny_model(num_layers=1))[0].graph).splitlines()
    assert lines[0] == "tokens: int64[T] = input"
    assert "slots: int64[N] = input" in lines
    assert "cu_seqlens: int64[N+1] = input" in lines
    assert "logit_rows: int64[R] = input" in lines
    assert any("float32[S, 2, L, 2, 16] = state" in line for line in lines)
    assert re.fullmatch(r"%\d+: float32\[R, 61\] = linear\(.*", lines[-2])
    assert re.fullmatch(r"return %\d+", lines[-1])


def test_formats_parts_and_fidelities_are_shown() -> None:
    precision = precision_of("bfp8", "hifi2", block_axis="out", li_o_prefill="hifi4", ff2="bf16")
    text = graph_text(lowered(tiny_model(num_layers=1), precision=precision)[0].graph)
    assert "{group=wqkv, format=bfp8/out, parts=q|k|v}" in text
    assert "{group=wqkv, weight=bfp8, fidelity=hifi2}" in text
    assert "{group=wo, weight=bfp8, fidelity=hifi4/hifi2}" in text
    assert "{group=ff2, format=bf16}" in text, "an axis means nothing to a format without blocks"


def test_one_layer_has_only_its_own_computing_nodes() -> None:
    graph = lowered(tiny_model())[0].graph
    text = graph_text(graph, layer=1)
    assert text
    assert all(line.startswith("%") for line in text.splitlines())
    assert "layers.0." not in text
    assert "layers.1." in text
    assert set(text.splitlines()) <= set(graph_text(graph).splitlines())


def test_what_changes_is_seen() -> None:
    graph = lowered(tiny_model(num_layers=1))[0].graph
    before = graph_text(graph)
    weight = next(node for node in graph.nodes if info(node).recipe is not None)
    recipe = info(weight).recipe
    assert recipe is not None
    set_info(weight, recipe=recipe.with_format("bfp4", "in"))
    assert graph_text(graph) != before


def test_operators_are_named() -> None:
    graph = lowered(tiny_model(num_layers=1))[0].graph
    names = {operator_name(node) for node in graph.nodes if node.op == "call_function"}
    assert {"linear", "rope_attention_step", "aten.index_select.default"} <= names
