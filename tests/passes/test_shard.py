"""Products are dealt by head and by block, and two exchanges stand in a layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.dealt_models import ARCHITECTURES, BIASES, assert_equal, dealt, make
from tests.function_graphs import function_graph
from tests.grids import only
from tests.tiny import check_golden, context_of, lowered, precision_of, run_graph, step_inputs
from tilewright.compiler import ops
from tilewright.compiler.ir.info import WEIGHT, WHOLE, info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.text import graph_text, operator_name
from tilewright.compiler.ir.verify import verify_sharded
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.passes.sharding.shard import shard
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CompileError

TWO = ParallelConfig(2, wire="fp32")
UNLIKE = ("llama", "gemma3_text", "qwen3_moe", "qwen3_5_moe")
"""By what stands in a layer; `test_virtual_ranks.py` has the numbers of all architectures."""


def shares(graph_module: Any, name: str) -> dict[int, list[list[tuple[int | None, int]]]]:
    """How a weight is dealt: by axis, the runs of each rank."""
    (node,) = [each for each in graph_module.graph.nodes if info(each).fqn.endswith(name)][:1]
    placement = info(node).placement
    assert placement is not None
    return {
        each.axis: [[(run.start, run.count) for run in share] for share in each.split.shares]
        for each in placement.sharded
    }


@pytest.mark.parametrize("model_type", only(UNLIKE, ARCHITECTURES))
def test_two_exchanges_stand_in_a_layer_and_the_numbers_stay(model_type: str) -> None:
    model = make(model_type)
    graph_module, ctx = dealt(model, TWO)
    verify_sharded(graph_module)
    calls = Counter(operator_name(each) for each in graph_module.graph.nodes)
    assert calls["all_reduce"] == 2 * model.config.num_layers
    assert calls["all_gather"] == 1
    assert not ctx.notes
    whole = {
        info(node).fqn.rpartition(".")[0].rpartition(".")[2]
        for node in graph_module.graph.nodes
        if info(node).role == WEIGHT and info(node).placement == WHOLE
    }
    assert {name for name in whole if "norm" not in name} <= {
        *("embed_tokens", "gate", "shared_expert_gate"),
    }
    assert ctx.reports[-1].num_rewrites == sum(
        info(node).role == WEIGHT and info(node).placement != WHOLE
        for node in graph_module.graph.nodes
    )
    before, _ = lowered(model, target="reference", until="round_activations")
    inputs = step_inputs(7, vocab_size=131)
    assert_equal(run_graph(graph_module, model, **inputs), run_graph(before, model, **inputs))


def test_one_rank_and_other_graphs_are_left_alone() -> None:
    graph_module, ctx = lowered(make(), target="reference", until="round_activations")
    before = graph_text(graph_module.graph)
    run_passes(graph_module, [shard], ctx)
    assert graph_text(graph_module.graph) == before

    def function(x: torch.Tensor, positions: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.linear(ops.swiglu(x, x) + 1.0, w)

    other, model = function_graph(function, w=(32, 32))
    ctx, before = context_of(model), graph_text(other.graph)
    ctx.parallel = TWO
    run_passes(other, [shard], ctx)
    assert ctx.reports[-1].num_rewrites == 0
    assert graph_text(other.graph) == before


def test_the_golden_text_of_a_layer() -> None:
    graph_module, _ = dealt(make("qwen3_5_moe"), TWO)
    text = "".join(graph_text(graph_module.graph, layer=layer) for layer in (0, 1))
    check_golden("shard/qwen3_5_moe.txt", text)


def test_gate_and_up_are_dealt_alike() -> None:
    """Halved as one tensor, some ranks would get gates only."""
    graph_module, _ = dealt(make(), ParallelConfig(3))
    gate, up = (shares(graph_module, f"mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert gate == up == {0: [[(0, 24)], [(24, 24)], [(48, 24)]]}
    assert shares(graph_module, "down_proj.weight") == {1: gate[0]}


def test_a_query_keeps_its_gate() -> None:
    """Files have a query's rows above its gate's, head by head: never all queries, then gates."""
    model = make("qwen3_5", num_layers=1, linear_layers=(False,), num_heads=4, num_kv_heads=2)
    graph_module, _ = dealt(model, TWO, rank=1)
    q, gate = (
        next(info(n).recipe for n in graph_module.graph.nodes if info(n).fqn.endswith(name))
        for name in ("self_attn.q_proj.weight", "self_attn.gate_proj.weight")
    )
    assert [each.rows for each in q.segments] == [(64, 80), (96, 112)]
    assert [each.rows for each in gate.segments] == [(80, 96), (112, 128)]
    assert {each.name for each in (*q.segments, *gate.segments)} == {
        "model.layers.0.self_attn.q_proj.weight"
    }


def test_queries_keys_and_values_of_linear_attention_have_their_own_widths() -> None:
    graph_module, _ = dealt(make("qwen3_5"), TWO)
    # 8 key heads of 8, 16 value heads of 12
    halves = [[(0, 32), (64, 32), (128, 96)], [(32, 32), (96, 32), (224, 96)]]
    assert shares(graph_module, "linear_attn.in_proj_qkv.weight") == {0: halves}
    assert shares(graph_module, "linear_attn.conv1d.weight") == {0: halves}
    for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        assert shares(graph_module, f"linear_attn.{name}") == {0: [[(0, 8)], [(8, 8)]]}
    assert shares(graph_module, "linear_attn.out_proj.weight") == {1: [[(0, 96)], [(96, 96)]]}


def test_experts_are_dealt_by_width_and_by_expert() -> None:
    graph_module, _ = dealt(make("qwen3_moe"), ParallelConfig(4, expert=2))
    experts, halves = [[(0, 3)], [(3, 3)]], [[(0, 32)], [(32, 32)]]
    assert shares(graph_module, "experts.up_proj.weight") == {0: experts, 1: halves}
    assert shares(graph_module, "experts.down_proj.weight") == {0: experts, 2: halves}


@pytest.mark.parametrize(("inner", "count", "parts"), [(512, 2, 1), (512, 4, 1), (512, 8, 2)])
def test_as_few_parts_of_experts_as_leave_whole_pieces(inner: int, count: int, parts: int) -> None:
    graph_module, _ = dealt(
        make("qwen3_moe", num_layers=1, expert_size=inner), ParallelConfig(count)
    )
    dealt_axes = shares(graph_module, "experts.down_proj.weight")
    assert len(dealt_axes[2]) == count // parts
    assert len(dealt_axes.get(0, [[]])) == parts


def test_large_pieces_are_taken_where_there_are_enough() -> None:
    graph_module, _ = dealt(make(intermediate_size=5 * 128 + 8), TWO)
    assert shares(graph_module, "down_proj.weight") == {1: [[(0, 384)], [(384, 264)]]}


def test_shares_are_kept_in_heads_and_columns() -> None:
    graph_module, _ = dealt(make(), ParallelConfig(2, shares=(3, 1)))
    assert shares(graph_module, "o_proj.weight") == {1: [[(0, 96)], [(96, 32)]]}
    assert shares(graph_module, "k_proj.weight") == {0: [[(0, 48)], [(48, 16)]]}


def test_whole_blocks_alone_are_dealt() -> None:
    precision = precision_of("fp32", ff2="q40", wo="q40")
    model = make(head_dim=40, num_kv_heads=8, intermediate_size=96)
    graph_module, _ = dealt(model, TWO, precision=precision)
    # Four heads of 40 are five blocks of 32; gate and up follow down's blocks.
    assert shares(graph_module, "o_proj.weight") == {1: [[(0, 160)], [(160, 160)]]}
    assert shares(graph_module, "gate_proj.weight") == {0: [[(0, 64)], [(64, 32)]]}


@pytest.mark.parametrize(
    ("changes", "parallel", "formats", "message"),
    [
        (
            {},
            ParallelConfig(9),
            {},
            "model.layers.0.self_attn: 8 query heads over 9 ranks; allowed: at most 8",
        ),
        (
            {"intermediate_size": 48},
            ParallelConfig(4),
            {"ff2": "q80"},
            "model.layers.0.mlp.down_proj: columns: 48 in blocks of 32 are 2, over 4 ranks; "
            "allowed: at most 2 ranks, or formats fp32, bf16, fp16",
        ),
        (
            {"model_type": "qwen3_5"},
            ParallelConfig(16),
            {},
            "model.layers.0.linear_attn: key heads: 8 in blocks of 1 are 8, over 16 ranks; "
            "allowed: at most 8 ranks",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    changes: dict[str, Any], parallel: ParallelConfig, formats: dict[str, str], message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        dealt(make(**changes), parallel, precision=precision_of(**formats))
    assert str(caught.value) == message


def test_a_head_of_few_rows_stays_whole_and_is_named() -> None:
    graph_module, ctx = dealt(make(vocab_size=61, intermediate_size=64), ParallelConfig(8))
    assert not find_calls(graph_module.graph, ops.all_gather)
    assert ctx.notes == ["whole on every rank: lm_head (61 rows are fewer than 8 x 16)"]


def test_the_wire_that_is_asked_for_is_sent() -> None:
    graph_module, _ = dealt(make(**BIASES), ParallelConfig(2, wire="q80"))
    calls = find_calls(graph_module.graph, ops.all_reduce)
    assert {call.args[1:] for call in calls} == {(2, "q80")}
