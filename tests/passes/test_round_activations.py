"""Where activations are q80, products read rounded values; everything else reads what it read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.function_graphs import function_graph
from tests.passes.rewrites import rewrite_text
from tests.tiny import (
    context_of,
    lowered,
    precision_of,
    run_graph,
    step_inputs,
    tiny_model,
)
from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.serialise import graph_json, read_graph
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.round_activations import round_activations
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.table import get_target

REWRITE = """\
- %linear0: float32[T, 64] = linear(%rms_norm0, self_attn.q_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
+ %round_q800: float32[T, 32] = round_q80(%rms_norm0)
+ %linear0: float32[T, 64] = linear(%round_q800, self_attn.q_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
- %linear1: float32[T, 32] = linear(%rms_norm0, self_attn.k_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
+ %linear1: float32[T, 32] = linear(%round_q800, self_attn.k_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
- %linear2: float32[T, 32] = linear(%rms_norm0, self_attn.v_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
+ %linear2: float32[T, 32] = linear(%round_q800, self_attn.v_proj)  {group=wqkv, weight=q40,
      fidelity=hifi4}
- %linear3: float32[T, 32] = linear(%flatten0, self_attn.o_proj)  {group=wo, weight=q40,
      fidelity=hifi4}
+ %round_q801: float32[T, 64] = round_q80(%flatten0)
+ %linear3: float32[T, 32] = linear(%round_q801, self_attn.o_proj)  {group=wo, weight=q40,
      fidelity=hifi4}
- %linear4: float32[T, 48] = linear(%rms_norm1, mlp.gate_proj)  {group=ff1_3, weight=q40,
      fidelity=hifi4}
- %linear5: float32[T, 48] = linear(%rms_norm1, mlp.up_proj)  {group=ff1_3, weight=q40,
      fidelity=hifi4}
+ %round_q802: float32[T, 32] = round_q80(%rms_norm1)
+ %linear4: float32[T, 48] = linear(%round_q802, mlp.gate_proj)  {group=ff1_3, weight=q40,
      fidelity=hifi4}
+ %linear5: float32[T, 48] = linear(%round_q802, mlp.up_proj)  {group=ff1_3, weight=q40,
      fidelity=hifi4}
- %linear6: float32[T, 32] = linear(%swiglu0, mlp.down_proj)  {group=ff2, weight=q40,
      fidelity=hifi4}
+ %round_q803: float32[T, 48] = round_q80(%swiglu0)
+ %linear6: float32[T, 32] = linear(%round_q803, mlp.down_proj)  {group=ff2, weight=q40,
      fidelity=hifi4}"""

NUM_LAYERS = 2
PRODUCTS = 7 * NUM_LAYERS + 1


def precision(activation: str = "q80", **changes: str) -> PrecisionConfig:
    return precision_of("q40", kv_cache="fp32", activation=activation, **changes)


def test_every_product_reads_rounded_values_and_shares_them() -> None:
    """q, k and v read one rounded norm, gate and up another: five of seven a layer are shared."""
    model = tiny_model(num_layers=NUM_LAYERS)
    graph_module, ctx = lowered(
        model, until="round_activations", target="reference", precision=precision()
    )
    run_passes(graph_module, [round_activations], ctx, verify=verify_precision)
    assert ctx.reports[-1].num_rewrites == PRODUCTS
    assert ctx.reports[-1].op_changes == {"round_q80": 4 * NUM_LAYERS + 1}
    products = find_calls(graph_module.graph, ops.linear)
    assert len(products) == PRODUCTS
    rounded = find_calls(graph_module.graph, ops.round_q80)
    assert {node.args[0] for node in products} == set(rounded)
    assert round_activations(graph_module, ctx) == 0


def test_what_wo_and_down_give_is_rounded_where_a_configuration_says_so() -> None:
    """In one layer of two, whatever products read; once."""
    outputs = precision_of(
        "q40", kv_cache="fp32", activation="fp32", layers="1: {block_output: q80}"
    )
    graph_module, ctx = lowered(
        tiny_model(num_layers=NUM_LAYERS),
        until="round_activations",
        target="reference",
        precision=outputs,
    )
    assert round_activations(graph_module, ctx) == 2
    rounded = find_calls(graph_module.graph, ops.round_q80)
    assert [info(node).fqn for node in rounded] == [
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert {user.target for node in rounded for user in node.users} == {torch.ops.aten.add.Tensor}
    assert all(set(node.args[0].users) == {node} for node in rounded)  # type: ignore[union-attr]
    assert round_activations(graph_module, ctx) == 0


@pytest.mark.parametrize("activation", ["mixed", "fp32", "bf16", "bfp8"])
def test_other_formats_are_left_alone(activation: str) -> None:
    graph_module, ctx = lowered(
        tiny_model(),
        until="round_activations",
        target="reference",
        precision=precision(activation),
    )
    before = graph_text(graph_module.graph)
    assert round_activations(graph_module, ctx) == 0
    assert graph_text(graph_module.graph) == before


def test_a_graph_without_products_and_one_without_precision_are_left_alone() -> None:
    def product(x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ops.linear(x, weight)
        return out

    for graph_module, model in (
        function_graph(lambda x, positions: (x + 1).exp() * 2),
        function_graph(product, weight=(8, 32)),
    ):
        before = graph_text(graph_module.graph)
        assert round_activations(graph_module, context_of(model)) == 0
        assert graph_text(graph_module.graph) == before


def test_layers_and_routers_that_are_to_stay_as_they_are() -> None:
    model = tiny_model(num_layers=NUM_LAYERS)
    only_one = precision_of(
        "q40", kv_cache="fp32", activation="fp32", layers="1: {activation: q80}"
    )
    graph_module, ctx = lowered(
        model, until="round_activations", target="reference", precision=only_one
    )
    routed = find_calls(graph_module.graph, ops.linear)[-2]
    set_info(routed, tensor_group="router")
    assert round_activations(graph_module, ctx) == 6
    rounded = find_calls(graph_module.graph, ops.round_q80)
    assert {info(node).layer for node in rounded} == {1}
    assert routed.args[0] not in rounded


@pytest.mark.parametrize("outputs", [{}, {"block_output": "q80"}])
def test_the_numbers_are_those_of_the_format(outputs: dict[str, str]) -> None:
    """By hand: the same graph, in which each product's input is rounded as ggml's Q8_0, and what
    wo and down give, too.
    """
    model = tiny_model(std=0.2, hidden_size=40, intermediate_size=56)
    inputs = step_inputs(9)
    plain, _ = lowered(model, target="reference", precision=precision("fp32"))
    expected = run_graph(plain, model, **inputs)
    for node in find_calls(plain.graph, ops.linear):
        with plain.graph.inserting_before(node):
            by_hand = plain.graph.call_function(get_format("q80").round_trip, (node.args[0],))
        node.update_arg(0, by_hand)
        if outputs and info(node).tensor_group in ("wo", "ff2"):
            with plain.graph.inserting_after(node):
                given = plain.graph.call_function(get_format("q80").round_trip, (node,))
            node.replace_all_uses_with(
                given, delete_user_cb=lambda user, own=given: user is not own
            )
    by_hand = run_graph(plain, model, **inputs)
    rounded, _ = lowered(model, target="reference", precision=precision(**outputs))
    found = run_graph(rounded, model, **inputs)
    assert torch.equal(found, by_hand)
    assert 1e-4 < (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("reference", "activation: q80: honoured (q80 into products)"),
        ("cpu", "activation: q80: not honoured (fp32)"),
        ("reference", "block_output: q80: honoured"),
        ("cpu", "block_output: q80: not honoured (not rounded)"),
    ],
)
def test_targets_say_what_they_make_of_it(target: str, line: str) -> None:
    """A target without the pass runs the configuration, and says with which activations."""
    outputs = precision(block_output="q80")
    graph_module, _ = lowered(tiny_model(), target=target, precision=outputs)
    options = CompileOptions(max_batch=1, max_context=32, compute="exact")
    found = get_target(target).contract(graph_module, options)
    assert line in [str(entry) for entry in found.entries]
    without, _ = lowered(tiny_model(), target=target, precision=precision())
    same = get_target(target).contract(without, options).effective_id == found.effective_id
    assert same is (target == "cpu"), "what is not honoured makes no other numbers"


def test_the_rewrite_is_expected() -> None:
    graph_module, ctx = lowered(
        tiny_model(), until="round_activations", target="reference", precision=precision()
    )
    text = graph_text(graph_module.graph, layer=0)
    run_passes(graph_module, [round_activations], ctx)
    assert rewrite_text(text, graph_text(graph_module.graph, layer=0)) == REWRITE
    back = read_graph(graph_json(lowered_whole()), Path("graph.json"))
    assert len(find_calls(back.graph, ops.round_q80)) == 4 * NUM_LAYERS + 1


def lowered_whole() -> torch.fx.GraphModule:
    """After all stages: what a compiled folder keeps."""
    return lowered(tiny_model(), target="reference", precision=precision())[0]
