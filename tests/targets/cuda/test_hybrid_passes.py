"""Mixed batches of hybrid models: several prompts, with and without decode rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5_moe import SIZES
from tests.targets.cuda.sharing import set_sharing
from tests.targets.cuda.test_executable import release
from tests.targets.cuda.test_ragged import (
    HYBRID,
    check_alike,
    logits_beside,
    one_after_the_other,
    uncaptured,
)
from tests.tiny import (
    compiled,
    joined,
    lowered,
    precision_of,
    random_tokens,
    take_slot,
    tiny_model,
)
from tilewright.compiler.targets.cuda import memory_budget as device
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.graphs.mixed_batch import MixedBatchRunner
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.steps.overlap import SideStream
from tilewright.compiler.targets.cuda.weights.copies import copy_bytes, kinds_for
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import PrefillChunk, StateSnapshot, Step
from tilewright.distributed.parallel import ParallelConfig
from tilewright.models.config import DeltaShape

HYBRID_MODEL = tiny_model(model_type="qwen3_5_moe", **{**HYBRID, "max_positions": 4096})
ON_DEVICE: dict[str, Any] = {
    **{**SIZES, "hidden_size": 256, "num_layers": 2, "linear_layers": (True, False)},
    **{"head_dim": 64, "delta": DeltaShape(2, 4, 128, 128, 4)},
    **{"num_experts": 2, "experts_per_token": 2},
}
"""A hybrid whose heads the device's own kernels take; every expert is chosen, so that no near tie
tells apart what is otherwise equal.
"""


@pytest.mark.parametrize(("kind", "pieces", "shared"), [("cuda", 4, 2048), ("cpu", 1, sys.maxsize)])
def test_a_hybrid_s_prompts_share_captured_passes_alone(
    kind: str, pieces: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with enough memory."""
    monkeypatch.setattr(device, "free_bytes", lambda *_: 1 << 40)
    model = tiny_model(model_type="qwen3_5_moe", **HYBRID)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
    options = CompileOptions(max_batch=4, max_context=128, max_shared_tokens=2048)
    found = device.capabilities_of(plan, options, torch.device(kind), 8, has_cpp=True)
    assert (found.max_prompts, found.most_shared, found.cell) == (pieces, shared, 1024)
    assert bool(found.passes) == (kind == "cuda")
    work = device.work_bytes(plan, options)
    assert work >= device.work_bytes(plan, replace(options, max_context=2048))
    few = replace(options, max_step_tokens=1024)
    limits = device.capabilities_of(plan, few, torch.device(kind), 8, has_cpp=True)
    assert limits.most_shared == min(shared, 1024) or not limits.passes


MANY = CompileOptions(max_batch=4, max_context=4096, max_step_tokens=8192)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MANY, (8, 8192)),
        (replace(MANY, max_shared_tokens=4096), (8, 4096)),
        (replace(MANY, max_step_tokens=4096), (8, 4096)),
        (replace(MANY, max_context=1088), (8, 4096)),
        (replace(MANY, max_context=576), (4, 2048)),
        (replace(MANY, max_batch=1), (4, 2048)),
        (replace(MANY, is_strict=True), (4, 2048)),
        (replace(MANY, max_shared_tokens=2048), (4, 2048)),
    ],
)
def test_larger_passes_are_shared_where_they_can_be_filled(
    options: CompileOptions, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight chunks fit with their snapshots. Memory for the graph is counted."""
    plan = lower_to_program(lowered(HYBRID_MODEL, target="cuda", precision=precision_of("bf16"))[0])
    small = replace(options, max_shared_tokens=2048)
    usual = device.work_bytes(plan, small), device.num_marks(plan, small)
    monkeypatch.setattr(device, "free_bytes", lambda *_: 1 << 40)
    monkeypatch.setattr(device, "invariant_of", lambda *_: "none")
    found = device.capabilities_of(plan, options, torch.device("cuda"), 8, has_cpp=True)
    assert (found.max_prompts, found.most_shared) == expected
    assert found.passes[-1][1][-1] == device.most_shared(plan, options) == expected[1]
    assert device.num_marks(plan, options) == 2 * expected[0]
    marks = (2 * expected[0] - usual[1]) * sequence_bytes(plan.sequence_states)
    work, size = device.work_bytes(plan, options), expected[1]
    assert work > usual[0] + marks if size > 2048 else work <= usual[0] + marks
    assert work >= 2 * device._pass_bytes(plan, options, size) or size == 2048


def test_a_smaller_pass_is_taken_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not refused."""
    plan = lower_to_program(lowered(HYBRID_MODEL, target="cuda", precision=precision_of("bf16"))[0])
    fixed = device.weight_bytes(plan) + device.state_bytes(plan, MANY)
    for size, less in ((8192, 4096), (4096, 2048), (2048, 2048)):
        need = fixed + device.work_bytes(plan, replace(MANY, max_shared_tokens=size))
        for free, expected in ((need, size), (need - 1, less)):
            monkeypatch.setattr(device, "free_bytes", lambda *_, free=free: free)
            found = device.with_passes_that_fit(plan, MANY, torch.device("cuda"))
            assert device.most_shared(plan, found) == expected
            if free >= need:
                device.check_fits(plan, found, free)
        two = replace(MANY, parallel=ParallelConfig(tensor=2))
        found = device.with_passes_that_fit(plan, two, torch.device("cuda"))
        assert device.most_shared(plan, found) == less, "ranks by themselves; see test_sharded"


@pytest.mark.parametrize("copies", ["none", "all"])
def test_pages_keep_three_quarters_beside_larger_passes(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every context fits. No model is refused that fits with smaller batches."""
    plan = lower_to_program(lowered(HYBRID_MODEL, target="cuda", precision=precision_of("bfp8"))[0])
    pages = replace(MANY, memory_fraction=0.9, max_batch=64, copies=copies)
    usual, held = replace(pages, max_shared_tokens=2048), copy_bytes(plan, kinds_for(pages))
    assert bool(held) == (copies == "all")
    fixed = device.weight_bytes(plan) + held + device.work_bytes(plan, usual)
    fixed += 64 * sequence_bytes(plan.sequence_states)
    a_context = device.state_bytes(plan, replace(pages, max_batch=1))
    more = device.work_bytes(plan, pages) - device.work_bytes(plan, usual)
    sizes = []
    for part in range(160):
        free = fixed + 2 * a_context + part * more // 20
        monkeypatch.setattr(device, "free_bytes", lambda *_, free=free: free)
        found = device.with_passes_that_fit(plan, pages, torch.device("cuda"))
        left, before = (device.shared_pages(plan, each, free, held) for each in (found, usual))
        assert 4 * (left + 1) >= 3 * before or left >= 64 * pages_of(pages.max_context)
        sizes.append(device.most_shared(plan, found))
    assert sizes == sorted(sizes) and set(sizes) == {2048, 4096, 8192}


def test_a_smaller_pass_than_was_asked_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compute": "fast", "max_batch": 4, "max_context": 4096}
    for size, said in ((8192, ()), (4096, ("of up to 4,096 tokens: memory is short for 8,192",))):
        less = partial(replace, max_shared_tokens=size)
        monkeypatch.setattr(
            device, "with_passes_that_fit", lambda _, asked, __, less=less: less(asked)
        )
        executable = compiled(HYBRID_MODEL, "cuda", precision=precision_of("bf16"), **options)
        notes = [each for each in executable.notes if each.startswith("prompts share passes ")]
        assert notes == [f"prompts share passes {each}" for each in said]
        executable.close()


@pytest.mark.gpu
def test_a_hybrid_s_rows_beside_prompts_have_the_bits_of_rows_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this step and the next step, which depends on the state, and in snapshots."""
    model = tiny_model(std=0.05, model_type="qwen3_5_moe", max_positions=2048, **ON_DEVICE)
    options = {"compute": "fast", "max_batch": 28, "max_context": 1152}
    pieces: list[Piece] = [(0, 300, (64, 256)), (128, 198, (192,)), (64, 65, ()), (0, 500, (448,))]
    found = []
    for is_beside in (False, True, True):
        if not is_beside:
            monkeypatch.setattr(SideStream, "run", one_after_the_other)
        executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
        assert isinstance(executable, CudaExecutable)
        found.append(several_beside(executable, 20, pieces))
        executable.close()
        monkeypatch.undo()
    (logits, kept), *others = found
    for again, states in others:
        assert torch.equal(again, logits) and len(states) == len(kept) > 0
        assert all(map(torch.equal, states, kept))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 20])
def test_rows_ride_along_with_a_piece_of_a_hybrid(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a captured graph."""
    model = tiny_model(std=0.05, model_type="qwen3_5_moe", **ON_DEVICE)
    options = {"compute": "fast", "max_batch": num_rows + 3, "max_context": 512}
    found = []
    for is_on in (False, True):
        set_sharing(monkeypatch, is_on)
        executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
        assert bool(executable.capabilities.passes) == is_on
        found.append(logits_beside(executable, num_rows, context=200, count=300, num_prompts=1))
        executable.close()
    check_alike(*found)


Piece = tuple[int, int, tuple[int, ...]]
"""Of a prompt: where it starts, where it ends, and where its state is kept on the way."""


def several_beside(
    executable: CudaExecutable, num_rows: int, pieces: list[Piece]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run chunks of started prompts with decode rows, then the same work in two other orders, then
    decode. Return logits and snapshots.
    """
    rows = tuple(take_slot(executable, 32) for _ in range(num_rows))
    for index, slot in enumerate(rows):
        tokens = tuple(random_tokens(9 + index % 7, seed=index))
        executable.step(Step(prompts=(PrefillChunk(slot, 0, tokens),)))
    logits, kept = [], []
    for order in (pieces, pieces[::-1]):
        slots, chunks = [], []
        for index, (start, end, places) in enumerate(order):
            slots.append(take_slot(executable, end + 1))
            tokens = tuple(random_tokens(end, seed=end))
            if start:
                executable.step(Step(prompts=(PrefillChunk(slots[-1], 0, tokens[:start]),)))
            saves = tuple((at, StateSnapshot(10 * index + n)) for n, at in enumerate(places))
            chunks.append(PrefillChunk(slots[-1], start, tokens[start:], chooses=True, saves=saves))
        forced = {slot: 1 + slot % 50 for slot in rows}
        step = Step(decode=rows, prompts=tuple(chunks), forced=forced, want_logits=True)
        output = executable.step(step)
        assert output.is_mixed == bool(executable.capabilities.passes)
        forced |= dict.fromkeys(slots, 2)
        after = executable.step(Step(decode=(*rows, *slots), forced=forced, want_logits=True))
        logits += [joined(output), joined(after)]
        held = sorted(executable._state._snapshots.items())
        kept += [state.clone() for _, (_, states) in held for state in states]
        release(executable, tuple(slots))
    release(executable, rows)
    return torch.cat(logits), kept


def test_several_pieces_of_a_hybrid_share_a_captured_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven chunks from the start and from later positions, with snapshots inside."""
    monkeypatch.setattr(MixedBatchRunner, "_uncaptured", uncaptured)
    model, found = tiny_model(std=0.2, model_type="qwen3_5_moe", **HYBRID), []
    pieces: list[Piece] = [(0, 70, (64,)), (64, 66, ()), (3, 8, (8,)), (0, 1, ())]
    for is_on in (False, True):
        set_sharing(monkeypatch, is_on)
        options = {"compute": "fast", "max_batch": 10, "max_context": 128}
        executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
        assert isinstance(executable, CudaExecutable)
        found.append(several_beside(executable, 2, pieces))
    (apart, kept), (together, inside) = found
    torch.testing.assert_close(together, apart, rtol=2e-2, atol=2e-2)
    assert len(inside) == len(kept) > 0
    for ours, theirs in zip(inside, kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize(
    ("totals", "pieces"),
    [
        (2048, [(0, 300, (64, 256)), (128, 198, (192,)), (64, 65, ()), (0, 500, (448,))]),
        (2048, [(0, 1024, (960,)), (0, 1024, (512, 1024))]),
        (2048, [(64, 129, (128,)), (0, 1030, (1024,)), (192, 800, (256, 768))]),
        (8192, [(0, 1024 - each, (512, 960)) for each in range(8)]),
        (8192, [(64, 1087, (128, 960)), (0, 65, (64,)), (0, 1024, ()), (192, 1088, (1024,))]),
    ],
)
def test_several_pieces_of_a_hybrid_share_a_pass_on_the_device(
    totals: int, pieces: list[Piece], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs of several sizes. Separate steps differ by bfloat16 rounding only."""
    monkeypatch.setattr(MixedBatchRunner, "_uncaptured", uncaptured)
    model = tiny_model(std=0.05, model_type="qwen3_5_moe", max_positions=2048, **ON_DEVICE)
    options = {"compute": "fast", "max_batch": num_rows + 8, "max_context": 1152}
    found, most = [], 4 if totals == 2048 else 8
    for is_on in (False, True):
        set_sharing(monkeypatch, is_on)
        monkeypatch.setattr(device, "_MOST_SHARED", totals)
        executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
        assert isinstance(executable, CudaExecutable)
        limits = executable.capabilities
        assert limits.max_prompts == (most if is_on else 1)
        assert limits.most_shared == totals or not limits.passes
        found.append(several_beside(executable, num_rows, pieces))
        executable.close()
    (apart, kept), (together, inside) = found
    check_alike(apart, together)
    assert len(inside) == len(kept) > 0
    for ours, theirs in zip(inside, kept, strict=True):
        check_alike(theirs, ours)
