"""What a step must move and compute, by hand on tiny graphs; limits of devices that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.tiny import lowered, precision_of, tiny_model
from tilewright.compiler.driver import compile_model
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ops.moe import expected_experts
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.evaluate.measure.roofline import (
    EMBEDDING,
    OTHER,
    STATE,
    StepTraffic,
    decode_work,
    limit_seconds,
    prefill_work,
    step_work,
)
from tilewright.evaluate.results.record import Ceilings

CEILINGS = Ceilings("made up", (90.0, 100.0, 1000.0), (2000.0, 1000.0, 1.0), "bf16")
LAYERS, HIDDEN, MIDDLE, VOCAB, HEADS, KV_HEADS, HEAD = 2, 32, 48, 61, 4, 2, 16
PRODUCTS = {
    "wqkv": LAYERS * (HEADS + 2 * KV_HEADS) * HEAD * HIDDEN,
    "wo": LAYERS * HEADS * HEAD * HIDDEN,
    "ff1_3": LAYERS * 2 * MIDDLE * HIDDEN,
    "ff2": LAYERS * MIDDLE * HIDDEN,
    "lm_head": VOCAB * HIDDEN,
}
"""Weights of the products of `tests.tiny.tiny_model`."""
NORMS = (2 * LAYERS + 1) * HIDDEN
FREQUENCIES = HEAD // 2
KV_POSITION = LAYERS * 2 * KV_HEADS * HEAD


def compiled(target: str, weights: str = "fp32", **changes: Any) -> Compiled:
    model = tiny_model(**changes)
    options = CompileOptions(max_batch=4, max_context=128)
    return compile_model(model, precision_of(weights), target=target, options=options)


def test_the_limit_is_the_longer_of_reading_and_computing() -> None:
    assert (CEILINGS.bytes_per_s, CEILINGS.flops_per_s) == (100.0, 1000.0)
    reads, computes = (
        StepTraffic({"ff2": 150.0, "wo": 50.0}, 100.0),
        StepTraffic({"ff2": 50.0}, 3000.0),
    )
    assert limit_seconds(reads, CEILINGS) == 2.0
    assert limit_seconds(computes, CEILINGS) == 3.0


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_in_fp32_by_hand(target: str, batch: int) -> None:
    """Every target lowers to another graph; what must be read is the same."""
    made = compiled(target, tie_embeddings=False)
    context = 100
    work = decode_work(made, batch=batch, context=context)
    products = {group: 4.0 * count for group, count in PRODUCTS.items()}
    products[EMBEDDING] = batch * 4.0 * HIDDEN
    products[OTHER] = 4.0 * (NORMS + FREQUENCIES)
    found = {part: size for part, size in work.bytes_by_part.items() if part != STATE}
    assert found == pytest.approx(products)
    if target == "cpu":
        assert work.bytes_by_part[STATE] == pytest.approx(batch * context * 4 * KV_POSITION)
    dense = 2.0 * batch * sum(PRODUCTS.values())
    attention = 4.0 * batch * LAYERS * HEADS * HEAD * context
    assert dense + attention < work.flops < 1.1 * (dense + attention)
    made.executable.close()


def test_a_tied_weight_is_read_once_and_its_rows() -> None:
    made = compiled("cpu")
    work = decode_work(made, batch=1, context=1)
    assert work.bytes_by_part["lm_head"] == 4 * PRODUCTS["lm_head"]
    assert work.bytes_by_part[EMBEDDING] == 4 * HIDDEN
    made.executable.close()


def test_a_prompt_attends_to_half_of_itself() -> None:
    made = compiled("cpu", tie_embeddings=False)
    length = 101
    work = prefill_work(made, num_tokens=length)
    head = 2.0 * PRODUCTS["lm_head"]
    dense = 2.0 * length * (sum(PRODUCTS.values()) - PRODUCTS["lm_head"]) + head
    attention = 4.0 * length * LAYERS * HEADS * HEAD * (length + 1) / 2
    assert dense + attention < work.flops < 1.1 * (dense + attention)
    assert work.bytes_by_part[STATE] == pytest.approx(length * 4 * KV_POSITION)
    assert work.bytes_by_part[EMBEDDING] == 4 * VOCAB * HIDDEN, "no more rows than there are"
    made.executable.close()


def cuda_work(weights: str, **changes: Any) -> StepTraffic:
    """Of the graph that the CUDA target lowers to; no device is needed."""
    model = tiny_model(hidden_size=128, intermediate_size=256, head_dim=32, **changes)
    graph, _ = lowered(model, target="cuda", precision=precision_of(weights))
    return step_work(
        graph,
        num_tokens=2,
        batch=2,
        context=10,
        attended=10,
        target=get_target("cuda"),
        compute="fast",
    )


@pytest.mark.parametrize(("weights", "tile"), [("bf16", 4096), ("bfp8", 2176), ("bfp4", 1152)])
def test_the_cuda_target_s_own_weight_storage_counts(weights: str, tile: int) -> None:
    """Tiles of 16 rows x 128 columns, the last of the vocabulary's 61 rows padded."""
    work = cuda_work(weights)
    tiles = {"wqkv": 2 * (128 + 2 * 64) // 16, "wo": 2 * 128 // 16, "lm_head": 4}
    tiles |= {"ff1_3": 2 * 2 * 256 // 16, "ff2": 2 * 2 * 128 // 16}
    found = {group: work.bytes_by_part[group] for group in tiles}
    assert found == {group: count * tile for group, count in tiles.items()}
    assert work.bytes_by_part[EMBEDDING] == pytest.approx(2 / 61 * 4 * 4096), "a table stays bf16"
    position = 2 * LAYERS * KV_HEADS * 32 * {"bf16": 2, "bfp8": 17 / 16, "bfp4": 2}[weights]
    assert work.bytes_by_part[STATE] == pytest.approx(2 * 10 * position)


def test_a_window_bounds_what_is_kept() -> None:
    graph, _ = lowered(tiny_model(), target="cuda", precision=precision_of("bf16"))
    first = next(node for node in graph.graph.nodes if info(node).state is not None)
    state = info(first).state
    assert state is not None
    set_info(first, state=dataclasses.replace(state, window=4))

    def cache(context: int) -> float:
        work = step_work(
            graph,
            num_tokens=1,
            batch=1,
            context=context,
            attended=context,
            target=get_target("cuda"),
            compute="fast",
        )
        return work.bytes_by_part[STATE]

    of_a_layer = KV_POSITION / LAYERS * 2
    assert cache(3) == pytest.approx(2 * of_a_layer * 3)
    assert cache(100) == pytest.approx(of_a_layer * 4 + of_a_layer * 100)


def test_experts_count_as_chosen_and_memories_twice() -> None:
    model = make_hybrid()
    graph, _ = lowered(model, target="cpu", precision=precision_of("fp32"))

    def parts(batch: int) -> Mapping[str, float]:
        work = step_work(
            graph,
            num_tokens=batch,
            batch=batch,
            context=10,
            attended=10,
            target=get_target("cpu"),
            compute="exact",
        )
        return work.bytes_by_part

    an_expert = 4 * 24 * 32
    layers, gate_and_up = 4, 2
    for batch in (1, 3):
        chosen = expected_experts(6, batch, 2)
        wanted = layers * gate_and_up * chosen * an_expert
        assert parts(batch)["experts_ff1_3"] == pytest.approx(wanted)
        assert parts(batch)["experts_ff2"] == pytest.approx(wanted / gate_and_up)
        memory = 3 * 4 * (128 * 3 + 4 * 16 * 16)
        assert parts(batch)[STATE] == pytest.approx(batch * (2 * memory + 10 * 256))
