"""Snapshots inside a prefill chunk: splits, and the saved state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.sharing import set_sharing
from tests.targets.cuda.test_executable import release
from tests.targets.cuda.test_ragged import chunk
from tests.targets.cuda.test_steps_mixers import BF16, model_of
from tests.targets.test_scheduled import alone, request
from tests.tiny import compiled, joined, lowered, random_tokens, take_slot, tiny_model
from tilewright.compiler.targets.cuda import memory_budget
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import marks_each, num_marks, work_bytes
from tilewright.compiler.targets.cuda.state.ragged import join, one
from tilewright.compiler.targets.cuda.state.snapshot_positions import MOST_MARKS, cut, marks_of
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import (
    LoadState,
    PrefillChunk,
    Slot,
    StateSnapshot,
    Step,
)
from tilewright.models.config import DeltaShape
from tilewright.runtime.loop import EngineLoop

CPU = torch.device("cpu")


def saving(start: int, count: int, *places: int) -> PrefillChunk:
    saves = tuple((at, StateSnapshot(n)) for n, at in enumerate(places))
    return chunk(3, start, count, saves=saves)


@pytest.mark.parametrize(
    ("piece", "most", "expected"),
    [
        (saving(0, 200), 2, [(0, 200, 0)]),
        (saving(0, 200, 64, 128), 2, [(0, 200, 2)]),
        (saving(0, 200, 64, 128), 0, [(0, 64, 1), (64, 128, 1), (128, 200, 0)]),
        (saving(0, 200, 192, 200, 64, 64), 2, [(0, 200, 4)]),
        (saving(0, 300, 64, 128, 192, 256), 2, [(0, 192, 3), (192, 300, 1)]),
        (saving(64, 200, 100, 164), 2, [(64, 100, 1), (100, 264, 1)]),
        (saving(0, 70, 5, 64), 2, [(0, 5, 1), (5, 64, 1), (64, 70, 0)]),
    ],
)
def test_a_piece_is_cut_only_where_its_kernels_cannot_keep_the_state(
    piece: PrefillChunk, most: int, expected: list[tuple[int, int, int]]
) -> None:
    found = cut(piece, most)
    assert [(each.start, each.end, len(each.saves)) for each in found] == expected
    assert sum((each.tokens for each in found), ()) == piece.tokens
    assert sorted(sum((each.saves for each in found), ())) == sorted(piece.saves)
    assert [each.chooses for each in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 1 or found[0] is piece


def test_the_first_token_behind_a_mark_says_where_the_state_goes() -> None:
    """For each of several chunks. Two snapshots at a position are a single mark."""
    other = chunk(1, 64, 130, saves=((192, StateSnapshot(7)), (192, StateSnapshot(8))))
    marks = marks_of((saving(0, 65, 64, 65), other), 6)
    assert marks == {(Slot(3), 64): 6, (Slot(1), 192): 7}
    rows = join((saving(0, 65, 64), other), CPU, alignment=64, marks=marks).rows
    assert rows.keeps is not None
    assert {at: kept for at, kept in enumerate(rows.keeps.tolist()) if kept >= 0} == {64: 6, 256: 7}
    alone, _ = one(other, CPU, {(Slot(1), 192): Slot(7)})
    assert alone.keeps is not None
    found = alone.keeps.tolist()
    assert [at for at, kept in enumerate(found) if kept >= 0] == [128] and found[128] == 7


def test_marks_are_there_where_sequences_have_state_and_take_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = CompileOptions(max_batch=4, max_context=64)
    hybrid, dense = (
        lower_to_program(lowered(model, target="cuda", precision=BF16)[0])
        for model in (model_of(), tiny_model(num_layers=1))
    )
    monkeypatch.setattr(memory_budget, "MOST_MARKS", 0)
    assert marks_each(hybrid) == num_marks(hybrid, options) == 0
    before = work_bytes(hybrid, options)
    monkeypatch.undo()
    assert (marks_each(hybrid), marks_each(dense), num_marks(dense, options)) == (2, 0, 0)
    assert work_bytes(hybrid, options) - before == 8 * sequence_bytes(hybrid.sequence_states)
    assert num_marks(hybrid, replace(options, compute="exact")) == 2, "one piece at a time"
    assert num_marks(hybrid, options) == 8


def snapshots(executable: CudaExecutable) -> dict[int, list[Tensor]]:
    return {int(n): kept for n, (_, kept) in executable._state._snapshots.items()}


def taken(
    executable: CudaExecutable, count: int, places: tuple[int, ...], rows: int = 0
) -> tuple[list[Tensor], Tensor, list[int]]:
    """Run a prompt with snapshots at ``places``, optionally with decode rows.

    Continue from each snapshot in another slot. Return snapshots, logits, and tokens per forward.
    """
    passes: list[int] = []
    run = executable._steps._prefill

    def watched(given: TokenBatch, *rest: Any, **options: Any) -> Tensor | None:
        passes.append(int((given.positions >= 0).sum()))
        return run(given, *rest, **options)

    slots = tuple(take_slot(executable, count + 8) for _ in range(rows + 2))
    for slot in slots[2:]:
        executable.step(Step(prompts=(PrefillChunk(slot, 0, tuple(random_tokens(9, seed=slot))),)))
    forced = {slot: 1 + slot for slot in slots[2:]}
    tokens = tuple(random_tokens(count, seed=1))
    saves = tuple((at, StateSnapshot(n)) for n, at in enumerate(places))
    piece = PrefillChunk(slots[0], 0, tokens, chooses=True, saves=saves)
    with pytest.MonkeyPatch.context() as patch:
        if executable.device.type == "cpu":
            patch.setattr(executable._steps, "_prefill", watched)
        step = Step(decode=slots[2:], prompts=(piece,), forced=forced, want_logits=True)
        output = executable.step(step)
    logits = [joined(output)]
    executable.step(Step(prompts=(PrefillChunk(slots[1], 0, tokens),)))
    kept = [each.clone() for n in range(len(places)) for each in snapshots(executable)[n]]
    for n, at in enumerate(places):
        executable.step(Step(edits=(LoadState(slots[1], StateSnapshot(n)),)))
        rest = PrefillChunk(slots[1], at, (*tokens, 7)[at:], chooses=True)
        logits.append(joined(executable.step(Step(prompts=(rest,), want_logits=True))))
    release(executable, slots)
    return kept, torch.cat(logits), passes


def test_a_prompt_with_snapshots_inside_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without decode rows: at its end, at a mark, and at a chunk end."""
    found = []
    for num_marks_each, shares in ((0, False), (MOST_MARKS, False), (MOST_MARKS, True)):
        monkeypatch.setattr(memory_budget, "MOST_MARKS", num_marks_each)
        set_sharing(monkeypatch, shares)
        options = {"compute": "fast", "max_batch": 5, "max_context": 128}
        executable = compiled(model_of(), "cuda", precision=BF16, **options)
        assert isinstance(executable, CudaExecutable)
        assert executable.capabilities.marks == num_marks_each
        found.append(taken(executable, 70, (70, 64), rows=1))
    assert [passes for *_, passes in found] == [[64, 6], [70], [71]]
    kept, logits, _ = found[0]
    for inside, ours, _ in found[1:]:
        for each, expected in zip(inside, kept, strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, logits, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_a_prompt_goes_on_from_what_was_kept_inside_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler finds the snapshot at the last whole page."""
    model = model_of(num_layers=2, linear_layers=(True, False))
    options: dict[str, Any] = {"compute": "exact", "max_batch": 3, "max_context": 192}
    executable = compiled(model, "cuda", precision=BF16, **options)
    loop, shared = EngineLoop(executable), random_tokens(130, seed=1)
    first, second = request([*shared, 5, 6], seed=1), request([*shared, 9], seed=2)
    for each in (first, second):
        loop.generate([each])
    assert (first.num_cached, second.num_cached) == (0, 128)
    for each in (first, second):
        assert each.output == alone(executable, each)


@pytest.mark.gpu
@pytest.mark.parametrize(("shares", "rows"), [(False, 0), (False, 3), (True, 3)])
def test_states_are_kept_inside_of_captured_passes(
    shares: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device's kernels.

    All experts are selected, so that near ties cannot differ. Only bfloat16 rounding remains.
    """
    from tests.models.test_qwen3_5_moe import SIZES

    size = {"hidden_size": 256, "num_layers": 2, "linear_layers": (True, False), "head_dim": 64}
    experts = {"delta": DeltaShape(2, 4, 128, 128, 4), "num_experts": 2, "experts_per_token": 2}
    model = tiny_model(std=0.05, model_type="qwen3_5_moe", **{**SIZES, **size, **experts})
    found = []
    for num_marks_each in (0, MOST_MARKS):
        monkeypatch.setattr(memory_budget, "MOST_MARKS", num_marks_each)
        set_sharing(monkeypatch, shares and bool(num_marks_each))
        options = {"compute": "fast", "max_batch": rows + 3, "max_context": 512}
        executable = compiled(model, "cuda", precision=BF16, **options)
        assert isinstance(executable, CudaExecutable)
        found.append(taken(executable, 300, (64, 256, 300), rows=rows)[:2])
        executable.close()
    (kept, logits), (inside, ours) = found
    assert kept[0].std() > 0
    for each, expected in ((ours, logits), *zip(inside, kept, strict=True)):
        assert each.isfinite().all() and expected.isfinite().all()
        assert float((each - expected).abs().max()) < 0.05 * float(expected.std())
