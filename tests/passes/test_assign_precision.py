"""Formats and fidelities against the configuration, layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.tiny import context_of, lowered, pipeline, precision_of, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.driver import trace_model, weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import WEIGHT, info
from tilewright.compiler.ir.recipe import load_dense, load_values
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.passes.assign_precision import assign_precision
from tilewright.compiler.passes.runner import Pass, run_passes
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.tracer import trace
from tilewright.errors import CompileError


def assigned(precision: PrecisionConfig, **changes: Any) -> tuple[GraphModule, SimpleNamespace]:
    """The graph just after the pass, and its model."""
    model = tiny_model(**changes)
    graph_module, ctx = lowered(model, until="assign_precision", precision=precision)
    run_passes(graph_module, [assign_precision], ctx)
    return graph_module, model


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_weights_hold_the_values_of_their_format(name: str, axis: str) -> None:
    graph_module, model = assigned(precision_of(name, block_axis=axis), attention_bias=True)
    get = weight_source(model)
    for node in graph_module.graph.nodes:
        facts = info(node)
        if facts.recipe is None:
            continue
        dense = load_dense(facts.recipe, get)
        values = load_values(facts.recipe, get)
        if facts.role != WEIGHT or dense.ndim == 1:
            assert facts.recipe.format == "fp32"
            assert torch.equal(values, dense)
        else:
            dimension = 0 if axis == "out" else 1
            expected = get_format(name).round_trip(dense, axis=dimension)
            assert torch.equal(values, expected)
            assert not torch.equal(values, dense)


def test_blocks_along_out_are_not_blocks_along_in() -> None:
    by_axis = []
    for axis in ("in", "out"):
        graph_module, model = assigned(precision_of("bfp8", block_axis=axis))
        node = next(n for n in graph_module.graph.nodes if info(n).tensor_group == "ff2")
        recipe = info(node).recipe
        assert recipe is not None and recipe.block_axis == axis
        by_axis.append(load_values(recipe, weight_source(model)))
    assert not torch.equal(*by_axis)


def test_a_format_without_blocks_has_no_axis() -> None:
    texts = [
        graph_text(assigned(precision_of("bf16", block_axis=axis))[0].graph)
        for axis in ("in", "out")
    ]
    assert texts[0] == texts[1]


GROUPS = {"wqkv": 3, "wo": 1, "ff1_3": 2, "ff2": 1}
OP_GROUPS = {"wqkv": "li_qkv", "wo": "li_o", "ff1_3": "li_ff1_3", "ff2": "li_ff2"}


@pytest.mark.parametrize("group", [*GROUPS, "lm_head", "embedding"])
def test_a_tensor_group_changes_its_own_weights_alone(group: str) -> None:
    base = graph_text(assigned(precision_of("bfp8"))[0].graph).splitlines()
    text = graph_text(assigned(precision_of("bfp8", **{group: "bfp4"}))[0].graph).splitlines()
    changed = [(a, b) for a, b in zip(base, text, strict=True) if a != b]
    assert all(f"group={group}" in a for a, _ in changed)
    assert [b for _, b in changed] == [a.replace("bfp8", "bfp4") for a, _ in changed]
    weights = [a for a, _ in changed if "= weight" in a]
    assert len(weights) == 2 * GROUPS.get(group, 0) or len(weights) == 1


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_op_group_changes_its_own_products_in_its_phase(group: str, phase: str) -> None:
    precision = precision_of("bfp8", "hifi4", **{f"{OP_GROUPS[group]}_{phase}": "lofi"})
    graph_module, _ = assigned(precision)
    for node in find_calls(graph_module.graph, ops.linear, ops.attention):
        facts = info(node)
        assert facts.compute is not None
        by_phase = {"prefill": facts.compute.prefill, "decode": facts.compute.decode}
        assert by_phase.pop(phase) == ("lofi" if facts.tensor_group == group else "hifi4")
        assert set(by_phase.values()) == {"hifi4"}


def test_attention_has_its_own_fidelity() -> None:
    graph_module, _ = assigned(precision_of("bfp8", "hifi4", sdpa_decode="hifi2"))
    for node in find_calls(graph_module.graph, ops.attention):
        facts = info(node)
        assert facts.op_group == "sdpa"
        assert facts.compute is not None
        assert (facts.compute.prefill, facts.compute.decode) == ("hifi4", "hifi2")


@pytest.mark.parametrize(
    ("rule", "layer"),
    [
        ("1: {ff2: bfp4, li_ff2: lofi}", 1),
        ("*.layers.0.mlp.down_proj: {ff2: bfp4}", 0),
        ("*.layers.1.mlp: {ff2: bfp4}", 1),
    ],
)
def test_an_override_changes_exactly_one_layer(rule: str, layer: int) -> None:
    base = graph_text(assigned(precision_of("bfp8"))[0].graph).splitlines()
    text = graph_text(assigned(precision_of("bfp8", layers=rule))[0].graph).splitlines()
    changed = [b for a, b in zip(base, text, strict=True) if a != b]
    assert len(changed) == 2, "a weight and the product that reads it"
    assert all(f"layers.{layer}.mlp.down_proj" in line for line in changed)
    assert all("=bfp4" in line for line in changed)


def through_precision() -> list[Pass]:
    """The pipeline's passes up to the one that is tested here."""
    passes = pipeline()
    return passes[: passes.index(assign_precision) + 1]


def test_a_product_of_no_tensor_group_is_refused_by_name() -> None:
    model = tiny_model(num_layers=1)
    model.module.tensor_groups = {
        name: group for name, group in model.module.tensor_groups.items() if group != "wo"
    }
    ctx = context_of(model)
    graph_module = trace(model.module)
    with pytest.raises(CompileError, match=r"model\.layers\.0\.self_attn\.o_proj.*no tensor group"):
        run_passes(graph_module, through_precision(), ctx)


def test_a_group_without_products_is_refused_by_name() -> None:
    model = tiny_model(num_layers=1)
    model.module.tensor_groups = model.module.tensor_groups | {"lm_head": "embedding"}
    with pytest.raises(CompileError, match=r"'lm_head' is of tensor group 'embedding'"):
        run_passes(trace(model.module), through_precision(), context_of(model))


def test_a_graph_without_products_is_left_alone() -> None:
    graph_module = trace_model(tiny_model())
    assert assign_precision(graph_module, context_of(tiny_model())) == 0
