"""One rank's program: its own weights and heads, and nothing in it that knows of places."""

from __future__ import annotations

import pytest
import torch

from tests.dealt_models import ARCHITECTURES, BIASES, assert_equal, dealt, make
from tests.grids import grid
from tests.tiny import arguments_of, check_golden, lowered, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.driver import lower_model, weight_source
from tilewright.compiler.ir.info import STATE, WEIGHT, info
from tilewright.compiler.ir.recipe import load_dense
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.passes.sharding.slice_rank import slice_rank
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.ranks.collective_driver import run_together
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import ParallelConfig


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_rank_s_shapes_are_its_own(model_type: str) -> None:
    model = make(model_type)
    for rank in (0, 2):
        graph_module, ctx = dealt(model, ParallelConfig(3), rank=rank)
        verify_precision(graph_module)
        assert ctx.reports[-1].num_rewrites == ctx.reports[-2].num_rewrites
        for node in graph_module.graph.nodes:
            facts = info(node)
            assert facts.placement is None
            if facts.role == WEIGHT:
                assert facts.recipe is not None
                assert facts.recipe.shape == tuple(node.meta["val"].shape)
                dense = load_dense(facts.recipe, weight_source(model))
                assert tuple(dense.shape) == facts.recipe.shape


def test_one_rank_is_left_alone() -> None:
    graph_module, ctx = lowered(make(), target="reference", until="round_activations")
    before = graph_text(graph_module.graph)
    run_passes(graph_module, [slice_rank], ctx)
    assert ctx.reports[-1].num_rewrites == 0
    assert graph_text(graph_module.graph) == before


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe"])
def test_the_ranks_together_have_the_numbers_of_the_whole(model_type: str) -> None:
    model, inputs = make(model_type), step_inputs(7, vocab_size=131)
    before, _ = lowered(model, target="reference", until="round_activations")
    expected = run_graph(before, model, **inputs)
    programs = []
    for rank in range(2):
        graph_module, _ = dealt(model, ParallelConfig(2), rank=rank)
        programs.append((graph_module, arguments_of(graph_module, model, inputs)))
    first, second = run_together(programs)
    assert torch.equal(first, second)
    assert_equal(first, expected)


def test_the_golden_text_of_a_layer() -> None:
    graph_module, _ = dealt(make("qwen3_5_moe"), ParallelConfig(4, expert=2), rank=3)
    text = "".join(graph_text(graph_module.graph, layer=layer) for layer in (0, 1))
    check_golden("slice_rank/qwen3_5_moe.txt", text)


def test_rank_0_alone_adds_the_bias_of_a_sum() -> None:
    for rank in range(2):
        graph_module, _ = dealt(make(num_layers=1, **BIASES), ParallelConfig(2), rank=rank)
        with_bias = [info(n).fqn for n in find_calls(graph_module.graph, ops.linear) if n.args[2:]]
        assert [name.rpartition(".")[2] for name in with_bias] == [
            *("q_proj", "k_proj", "v_proj"),
            *(["o_proj"] if rank == 0 else []),
            *("gate_proj", "up_proj"),
            *(["down_proj"] if rank == 0 else []),
        ]
        names = [info(node).fqn for node in graph_module.graph.nodes]
        assert ("model.layers.0.self_attn.o_proj.bias" in names) == (rank == 0)


def test_experts_of_others_are_left_out() -> None:
    graph_module, _ = dealt(make("qwen3_moe", num_layers=1), ParallelConfig(4, expert=2), rank=2)
    (local,) = find_calls(graph_module.graph, ops.local_experts)
    assert local.args[1:] == (3, 3)
    products = find_calls(graph_module.graph, ops.expert_linear)
    assert [product.args[2] for product in products] == [local] * 3
    assert [tuple(info(p.args[1]).recipe.shape) for p in products] == [  # type: ignore[union-attr, arg-type]
        *((3, 32, 32), (3, 32, 32)),
        (3, 32, 32),
    ]


def test_state_is_a_rank_s_own() -> None:
    model = make("qwen3_5")
    precision = lowered(model, target="reference")[1].precision
    stages = get_target("reference").stages()
    graph_module, _ = lower_model(
        model, precision, stages, silent, parallel=ParallelConfig(2, wire="fp32"), rank=1
    )
    states = [info(node).state for node in graph_module.graph.nodes if info(node).role == STATE]
    found = {each.name.rpartition(".")[2]: each.shape for each in states if each}
    assert found == {"kv": (2, 2, 16), "window": (160, 3), "memory": (8, 8, 12)}


@pytest.mark.parametrize(
    ("model_type", "target"),
    grid([("qwen2",), ("gemma3_text",), ("qwen3_5_moe",)], ["cpu-native", "cuda"]),
)
def test_later_passes_work_on_a_rank_s_program(model_type: str, target: str) -> None:
    """The whole pipelines of targets, whose products are merged and fused, by the references."""
    model, inputs = make(model_type), step_inputs(7, vocab_size=131)
    precision = lowered(model, target="reference")[1].precision
    stages = get_target(target).stages()
    whole, _ = lower_model(model, precision, stages, silent)
    expected = run_graph(whole, model, **inputs)
    programs = []
    for rank in range(3):
        parallel = ParallelConfig(3, wire="fp32")
        graph_module, ctx = lower_model(
            model, precision, stages, silent, parallel=parallel, rank=rank
        )
        assert not [note for note in ctx.notes if "not merged" in note]
        programs.append((graph_module, arguments_of(graph_module, model, inputs)))
    first, *others = run_together(programs)
    assert all(torch.equal(first, each) for each in others)
    assert_equal(first, expected)
