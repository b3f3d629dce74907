"""What a step must read and compute: of experts, those that its tokens are expected to choose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dealt_models import make as make_dealt
from tests.models.test_experts_gguf import make
from tests.tiny import lowered, precision_of
from tilewright.compiler import ops
from tilewright.compiler.ir.cost import GroupCost, step_costs
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.passes.sharding.shard import shard
from tilewright.compiler.passes.sharding.slice_rank import slice_rank
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import ParallelConfig
from tilewright.evaluate.measure.roofline import weight_bytes


def costs(kind: str, target: str, num_tokens: int) -> dict[str, GroupCost]:
    graph_module, _ = lowered(make(kind), target=target, precision=precision_of("bf16"))
    found = step_costs(graph_module, num_tokens=num_tokens, context=16)
    return {cost.group: cost for cost in found}


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
def test_experts_count_as_often_as_they_are_expected(
    kind: str, target: str, num_tokens: int
) -> None:
    config: Any = make(kind).config
    found = costs(kind, target, num_tokens)
    count, chosen = config.num_experts, config.experts_per_token
    read = count * (1 - (1 - chosen / count) ** num_tokens)
    matrix = config.num_layers * config.expert_size * config.hidden_size
    assert found["experts_ff2"].num_weights == pytest.approx(read * matrix, abs=20)
    assert found["experts_ff1_3"].num_weights == pytest.approx(2 * read * matrix, abs=20)
    assert found["experts_ff1_3"].weight_bytes == pytest.approx(4 * read * matrix, abs=20)
    assert found["experts_ff2"].flops == 2 * num_tokens * chosen * matrix
    assert found["embedding"].num_weights == num_tokens * config.hidden_size
    if config.shared_size:
        shared = config.num_layers * config.shared_size * config.hidden_size
        assert found["shared_ff2"].num_weights == shared


def test_so_do_the_bytes_that_a_device_reads() -> None:
    graph_module, _ = lowered(make("qwen3_moe"), target="reference")
    target = get_target("reference")
    one, many = (
        weight_bytes(graph_module, num_tokens=tokens, target=target, compute="exact")
        for tokens in (1, 10_000)
    )
    assert one["experts_ff2"] == pytest.approx(many["experts_ff2"] * 2 / 6)
    assert one["wqkv"] == many["wqkv"]


@pytest.mark.parametrize(("wire", "num_bytes"), [("fp32", 4), ("bf16", 2), ("q80", 34 / 32)])
def test_what_a_rank_sends_is_counted_in_the_wire_s_format(wire: str, num_bytes: float) -> None:
    model = make_dealt()
    graph_module, ctx = lowered(model, target="reference", until="round_activations")
    ctx.parallel, ctx.rank = ParallelConfig(3, wire=wire), 1
    run_passes(graph_module, [shard, slice_rank], ctx)
    costs = step_costs(graph_module, num_tokens=5, context=16, num_logits=5)
    found = {cost.group: cost for cost in costs}
    rows = find_calls(graph_module.graph, ops.all_gather)[0].args[1][1]  # type: ignore[index]
    sums = 2 * model.config.num_layers * model.config.hidden_size
    assert found["collective"].sent_bytes == 5 * 2 * (sums * num_bytes + rows * 4)
    assert found["collective"].num_weights == 0
    assert found["ff2"].sent_bytes == 0
    inner, hidden = 24, model.config.hidden_size
    assert found["ff2"].num_weights == model.config.num_layers * inner * hidden, "a rank's own"
