"""One graph for all lengths: inputs, weights, names and layers, compared with the eager module."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.models.test_gemma3_text import make as make_gemma3
from tests.models.test_qwen3_next import make as make_qwen3_next
from tests.tiny import lowered, random_tokens, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.driver import trace_model
from tilewright.compiler.ir.info import CONSTANT, INPUT, WEIGHT, info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.tracer import grouped_modules

aten = torch.ops.aten


def roles(graph_module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return [(info(node).role, info(node).fqn or str(node.target)) for node in nodes]


def test_inputs_come_first_then_every_parameter_then_constants() -> None:
    model = tiny_model(tie_embeddings=False)
    found = roles(trace_model(model))
    assert found[:2] == [(INPUT, "tokens"), (INPUT, "positions")]
    weights = [name for role, name in found if role == WEIGHT]
    assert sorted(weights) == sorted(name for name, _ in model.module.named_parameters())
    assert found[-1] == (CONSTANT, "model.rotary.inv_freq")
    assert len(found) == 2 + len(weights) + 1


def test_tied_embeddings_are_two_inputs_of_one_recipe_name() -> None:
    graph_module = trace_model(tiny_model(tie_embeddings=True))
    name = "model.embed_tokens.weight"
    tied = [node for node in graph_module.graph.nodes if info(node).fqn == name]
    assert len(tied) == 2
    recipes = [info(node).recipe for node in tied]
    assert recipes[0] == recipes[1]
    assert recipes[0] is not None and recipes[0].names == (name,)
    users = [user.target for node in tied for user in node.users]
    assert sorted(map(str, users)) == ["aten.embedding.default", "aten.linear.default"]
    untied = roles(trace_model(tiny_model(tie_embeddings=False)))
    assert (WEIGHT, "lm_head.weight") in untied


def test_tokens_and_positions_are_two_inputs() -> None:
    """Export takes one tensor that is passed twice for one input; each must have its own users."""
    graph_module = trace_model(tiny_model(num_layers=1))
    tokens, positions = list(graph_module.graph.nodes)[:2]
    assert (tokens.target, positions.target) == ("tokens", "positions")
    assert {user.target for user in tokens.users} == {aten.embedding.default}
    assert tokens.users.keys().isdisjoint(positions.users)
    assert aten.to.dtype in {user.target for user in positions.users}


def test_positions_turn_heads_and_tokens_choose_rows() -> None:
    model = tiny_model(num_layers=1, std=0.2)
    graph_module, _ = lowered(model, until="assign_precision")
    inputs = step_inputs(4)
    base = run_graph(graph_module, model, **inputs)
    shifted = run_graph(graph_module, model, **inputs | {"positions": inputs["positions"] + 50})
    torch.testing.assert_close(shifted, base, atol=1e-5, rtol=1e-5)  # rotation is relative
    spread = run_graph(graph_module, model, **inputs | {"positions": inputs["positions"] * 9})
    assert not torch.allclose(spread, base, atol=1e-4)
    swapped = run_graph(graph_module, model, **inputs | {"tokens": inputs["tokens"].flip(0)})
    assert not torch.allclose(swapped, base, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_the_length_stays_dynamic(bias: bool) -> None:
    model = tiny_model(std=0.2, attention_bias=bias, output_bias=bias, mlp_bias=bias)
    graph_module, _ = lowered(model, until="assign_precision")
    weights = model.checkpoint.tensors | model.module.constants()
    for length in (1, 2, 7, 33):
        tokens = torch.tensor(random_tokens(length, seed=length))
        positions = torch.arange(length)
        with torch.no_grad():
            expected = torch.func.functional_call(model.module, weights, (tokens, positions))
        got = run_graph(graph_module, model, tokens=tokens, positions=positions)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_the_length_is_one_symbol() -> None:
    graph_module = trace_model(tiny_model(num_layers=1))
    sizes = {
        str(node.meta["val"].shape[0])
        for node in graph_module.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and isinstance(node.meta["val"].shape[0], torch.SymInt)
    }
    assert len(sizes) == 1


def test_nodes_know_their_module_and_layer() -> None:
    graph = trace_model(tiny_model()).graph
    products = [info(node) for node in find_calls(graph, aten.linear.default)]
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    folders = ["self_attn"] * 4 + ["mlp"] * 3
    expected = [
        f"model.layers.{layer}.{folder}.{name}"
        for layer in range(2)
        for folder, name in zip(folders, names, strict=True)
    ]
    assert [facts.fqn for facts in products] == [*expected, "lm_head"]
    assert [facts.layer for facts in products] == [0] * 7 + [1] * 7 + [None]
    attention = [info(node) for node in find_calls(graph, ops.attention)]
    assert [(facts.fqn, facts.layer) for facts in attention] == [
        ("model.layers.0.self_attn", 0),
        ("model.layers.1.self_attn", 1),
    ]


def test_only_what_takes_part_has_a_tensor_group() -> None:
    graph = trace_model(tiny_model(num_layers=1)).graph
    found = {
        info(node).fqn: info(node).tensor_group
        for node in graph.nodes
        if info(node).tensor_group is not None
    }
    assert found == {
        "model.embed_tokens": "embedding",
        "model.layers.0.self_attn.q_proj": "wqkv",
        "model.layers.0.self_attn.k_proj": "wqkv",
        "model.layers.0.self_attn.v_proj": "wqkv",
        "model.layers.0.self_attn": "kv_cache",
        "model.layers.0.self_attn.o_proj": "wo",
        "model.layers.0.mlp.gate_proj": "ff1_3",
        "model.layers.0.mlp.up_proj": "ff1_3",
        "model.layers.0.mlp.down_proj": "ff2",
        "lm_head": "lm_head",
    }
    for node in find_calls(graph, aten.linear.default):
        assert info(node).tensor_group is not None
    assert len(find_calls(graph, aten.mul.Tensor)) > 0


@pytest.mark.parametrize(
    "make", [tiny_model, make_gemma3, make_qwen3_next], ids=lambda f: f.__module__
)
def test_groups_are_told_without_tracing(make: Callable[[], SimpleNamespace]) -> None:
    model = make()
    nodes = [node for node in trace_model(model).graph.nodes if node.op == "call_function"]
    found = {(facts.fqn, facts.tensor_group, facts.layer) for facts in map(info, nodes)}
    expected = grouped_modules(model.module)
    assert {each for each in found if each[1] is not None} == set(expected)
    assert len(expected) > 8


def test_biases_are_inputs_with_recipes_of_their_own() -> None:
    graph_module = trace_model(tiny_model(num_layers=1, attention_bias=True, output_bias=True))
    biases = [name for _, name in roles(graph_module) if name.endswith("bias")]
    attention = "model.layers.0.self_attn"
    assert sorted(biases) == sorted(f"{attention}.{part}_proj.bias" for part in "qkvo")
    for node in find_calls(graph_module.graph, aten.linear.default):
        of_attention = ".self_attn." in info(node).fqn
        assert len(node.args) == (3 if of_attention else 2)
        if of_attention:
            weight, bias = node.args[1:3]
            assert info(weight).fqn.removesuffix(".weight") == info(node).fqn  # type: ignore[arg-type]
            assert info(bias).fqn.removesuffix(".bias") == info(node).fqn  # type: ignore[arg-type]


def test_parts_are_named_after_the_projections() -> None:
    graph = trace_model(tiny_model(num_layers=1)).graph
    parts = {
        info(node).fqn: info(node).recipe.segments[0].part  # type: ignore[union-attr]
        for node in graph.nodes
        if info(node).role == WEIGHT
    }
    assert parts["model.layers.0.self_attn.q_proj.weight"] == "q"
    assert parts["model.layers.0.mlp.gate_proj.weight"] == "gate"


def test_tracing_does_not_touch_the_module() -> None:
    model = tiny_model(num_layers=1)
    trace_model(model)
    assert all(weight.device.type == "meta" for weight in model.module.parameters())
    assert model.checkpoint.reads == []
