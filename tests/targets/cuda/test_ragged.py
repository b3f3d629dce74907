"""Chunks of several prompts in a step: their layout, and equality with single runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.grids import only
from tests.models.test_qwen3_5_moe import ON_CUDA
from tests.targets.cuda.sharing import set_sharing
from tests.targets.cuda.test_executable import release
from tests.tiny import (
    compiled,
    joined,
    lowered,
    precision_of,
    random_tokens,
    take_slot,
    tiny_model,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda import memory_budget as device
from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.mixed_batch import MixedBatchRunner
from tilewright.compiler.targets.cuda.lowering import far_of, lower_to_program
from tilewright.compiler.targets.cuda.state.ragged import can_join, join, one, split
from tilewright.compiler.targets.cuda.steps.overlap import SideStream
from tilewright.compiler.targets.interface.base import Capabilities, CompileOptions, Executable
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot, StateSnapshot, Step
from tilewright.compiler.targets.program.instructions import AttentionOp
from tilewright.distributed.parallel import ParallelConfig

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}


def chunk(slot: int, start: int, count: int, **changes: Any) -> PrefillChunk:
    return PrefillChunk(
        Slot(slot), start, tuple(range(1, count + 1)), **{"chooses": True, **changes}
    )


def limits_of(**limits: Any) -> Capabilities:
    return Capabilities(max_num_seqs=8, max_context=1024, **limits)


def test_each_chunk_begins_at_a_multiple_of_the_alignment() -> None:
    chunks = [chunk(4, 0, 65), chunk(2, 128, 3, chooses=False), chunk(7, 9, 64)]
    found = join(chunks, CPU, alignment=64)
    assert found.layout.is_short
    assert found.layout.starts.tolist() == [0, 128, 192, 256]
    assert found.last.tolist() == [64, 255]
    rows = found.rows
    assert rows.positions[[0, 64, 65, 127, 128, 130, 131, 192]].tolist() == (
        [0, 64, -1, -1, 128, 130, -1, 9]
    )
    assert rows.slots.view(4, 64).tolist() == [[slot] * 64 for slot in (4, 4, 2, 7)]
    assert rows.tokens[[0, 64, 65, 128, 255]].tolist() == [1, 65, 0, 1, 64]
    found = join([chunk(0, 0, 600), chunk(1, 0, 500)], CPU, alignment=64)
    assert not found.layout.is_short and found.layout.starts.tolist() == [0, 640, 1152]
    found = join(chunks, CPU, alignment=1)
    assert found.layout.starts.tolist() == [0, 65, 68, 144] and found.last.tolist() == [64, 131]
    assert found.rows.positions[64:70].tolist() == [64, 128, 129, 130, 9, 10]
    assert found.rows.positions[132:].tolist() == [-1] * 12, "whole pieces of memory"


def test_a_piece_alone_has_no_padding() -> None:
    rows, wanted = one(chunk(3, 7, 2), CPU)
    assert [each.tolist() for each in (rows.tokens, rows.positions, rows.slots)] == (
        [[1, 2], [7, 8], [3, 3]]
    )
    assert wanted is not None and wanted.tolist() == [1]
    echoed, silent = (one(chunk(3, 0, 2, chooses=False, echoes=each), CPU)[1] for each in (1, 0))
    assert echoed is not None and echoed.tolist() == [0, 1] and silent is None


def test_what_wants_more_than_a_choice_runs_alone() -> None:
    plain, behind = chunk(0, 0, 3), chunk(1, 0, 3, saves=((3, StateSnapshot(0)),))
    within, echoing = chunk(2, 0, 3, saves=((2, StateSnapshot(0)),)), chunk(3, 0, 3, echoes=True)
    others = chunk(4, 0, 3, also=(Slot(5),))
    any_rows = limits_of()
    found = [can_join(each, any_rows) for each in (plain, behind, within, echoing, others)]
    assert found == [True, True, False, False, False]
    assert can_join(chunk(2, 0, 99, saves=((64, StateSnapshot(0)),)), limits_of(marks=1))
    assert split([plain, within, behind], 8, limits=any_rows) == ([[plain, behind]], [within])
    several = split([plain, behind, chunk(6, 0, 3)], 2, limits=any_rows)[0]
    assert several == [[plain, behind], [chunk(6, 0, 3)]]
    assert split([plain, behind], 1, limits=any_rows) == ([], [plain, behind])
    assert split([plain], 8, limits=any_rows) == ([], [plain])
    assert split([plain], 8, limits=any_rows, beside=True) == ([[plain]], [])
    beside = split([plain, within, behind], 1, limits=any_rows, beside=True)
    assert beside == ([[plain], [behind]], [within])


def test_batches_have_no_more_rows_than_the_largest_pass() -> None:
    """Padding to the alignment counts. A longer chunk runs separately."""
    chunks = [chunk(slot, 0, count) for slot, count in enumerate((64, 65, 1, 192, 193, 3))]
    most = limits_of(most_shared=192, alignment=64)
    assert split(chunks, 8, limits=most) == (
        [chunks[:2], chunks[2:3], chunks[3:4], chunks[5:]],
        [chunks[4]],
    )
    assert split(chunks[:3], 8, limits=replace(most, most_shared=256))[0] == [chunks[:3]]
    assert can_join(chunks[3], most) and not can_join(chunks[4], most)
    packed = split(chunks, 8, limits=replace(most, alignment=1))
    assert packed == ([chunks[:3], chunks[3:4], chunks[5:]], [chunks[4]])


def test_rows_that_ride_along_lie_behind_the_pieces_and_want_logits_first() -> None:
    chunks = [chunk(4, 0, 65), chunk(2, 128, 3, chooses=False)]
    slots = tuple(Slot(number) for number in range(5, 22))
    found = join(chunks, CPU, alignment=64, slots=slots, positions=range(100, 117))
    assert found.layout.decoding == slice(192, 209)
    assert found.layout.starts.tolist() == [0, 128, 192]
    assert found.last.tolist() == [*range(192, 209), 64]
    rows = found.rows
    assert len(rows.tokens) == 224, "whole pieces of memory"
    assert rows.positions[192:].tolist() == [*range(100, 117), *[-1] * 15]
    assert rows.slots[192:209].tolist() == [*slots]
    found.take_tokens(torch.arange(30) * 10)
    assert rows.tokens[192:209].tolist() == [10 * slot for slot in slots]
    assert rows.tokens[:65].tolist() == [*range(1, 66)], "the pieces keep theirs"
    found = join(chunks, CPU, alignment=1, slots=slots, positions=range(100, 117))
    assert found.layout.decoding == slice(80, 97)


HYBRID: dict[str, Any] = {**ON_CUDA, "num_layers": 1, "hidden_size": 16, "linear_layers": (True,)}


def made(
    model_type: str,
    monkeypatch: pytest.MonkeyPatch,
    is_on: bool = True,
    weights: str = "bf16",
) -> Executable:
    set_sharing(monkeypatch, is_on)
    model = tiny_model(
        std=0.2, model_type=model_type, **(SMALL if model_type == "llama" else HYBRID)
    )
    options = {"compute": "fast", "max_batch": 6, "max_context": 64}
    return compiled(model, "cuda", precision=precision_of(weights), **options)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe"])
def test_prompts_together_are_those_of_each_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start and from later positions. Decoding continues from their state."""
    monkeypatch.setattr(device, "_JOINED_OF_MIXERS", 8)
    executable, found = made(model_type, monkeypatch), []
    assert executable.capabilities.max_prompts == 8
    sizes = ((0, 5), (4, 3), (0, 2))
    for is_together in (True, False):
        rows = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams()]
        slots = tuple(take_slot(executable, 12, row) for row in rows)
        prompts = [tuple(random_tokens(8, seed=index)) for index in range(3)]
        executable.step(Step(prompts=(PrefillChunk(slots[1], 0, prompts[1][:4]),)))
        chunks = tuple(
            PrefillChunk(slot, start, prompt[start : start + count], chooses=True)
            for slot, prompt, (start, count) in zip(slots, prompts, sizes, strict=True)
        )
        steps = [chunks] if is_together else [(each,) for each in chunks]
        outputs = [executable.step(Step(prompts=each, want_logits=True)) for each in steps]
        tokens = [token for each in outputs for part in each.parts for token in part.read().tokens]
        after = executable.step(Step(decode=slots, want_logits=True))
        logits = torch.cat([*(joined(each) for each in outputs), joined(after)])
        found.append((tokens, logits, after.parts[0].read().tokens))
        release(executable, slots)
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-2, atol=2e-2)


PROMPTS = [tuple(random_tokens(10, seed=seed)) for seed in range(4)]
ROWS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
    SamplingParams(temperature=0.7),
]


def served(executable: Executable, how: dict[str, Any] | None = None) -> tuple[list[Any], Any]:
    """Two sequences decode while two prompts run in chunks, then all four decode.

    Return tokens by slot, logits, and the mixed steps.
    """
    slots = tuple(take_slot(executable, 20, row) for row in ROWS)
    first = tuple(PrefillChunk(slots[n], 0, PROMPTS[n], chooses=True) for n in (0, 1))
    late = [(2, 0, 4), (3, 0, 6)], [(2, 4, 10), (3, 6, 9)], [(3, 9, 10)]
    steps = [Step(prompts=first, want_logits=True), Step(decode=slots[:2], want_logits=True)]
    for pieces in late:
        chunks = tuple(
            PrefillChunk(slots[n], start, PROMPTS[n][start:end], chooses=end == 10)
            for n, start, end in pieces
        )
        decode = slots[:3] if pieces == late[2] else slots[:2]
        forced = {slots[0]: 7} if pieces == late[0] else {}
        given = Step(decode=decode, prompts=chunks, forced=forced, want_logits=True)
        steps.append(replace(given, **(how or {})))
    steps += [Step(decode=slots, want_logits=True)] * 2
    found, mixed = [], []
    for step in steps:
        output = executable.step(step)
        mixed.append(output.is_mixed)
        parts = [
            (slot, token, row)
            for part in output.parts
            for slot, token, row in zip(
                part.slots, part.read().tokens, part.logits() if part.logits else (), strict=True
            )
        ]
        found.append(sorted((slot, token) for slot, token, _ in parts))
        found.append(torch.stack([row for *_, row in sorted(parts, key=lambda each: each[0])]))
    release(executable, slots)
    return found, mixed


@pytest.mark.parametrize(
    ("model_type", "weights"),
    only(
        [("llama", "bfp8"), ("qwen3_5_moe", "bf16")],
        [("llama", "bf16"), ("llama", "bfp8"), ("qwen3_5_moe", "bf16")],
    ),
)
def test_rows_that_ride_along_are_those_of_steps_apart(
    model_type: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes forced tokens, random sampling, a prompt with a single chunk, and later steps."""
    executables = [made(model_type, monkeypatch, each, weights) for each in (False, True)]
    assert [bool(each.capabilities.passes) for each in executables] == [False, True]
    (apart, never), (mixed, sometimes) = map(served, executables)
    assert not any(never) and sometimes == [False, False, True, True, True, False, False]
    for ours, theirs in zip(mixed, apart, strict=True):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        else:
            assert ours == theirs


def uncaptured(*_: Any) -> None:
    raise AssertionError("launched kernel by kernel")


def test_rows_ride_along_only_where_all_pieces_may_end_in_a_captured_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "passes_for", lambda *_, **__: ((3, (64, 128)),))
    monkeypatch.setattr(MixedBatchRunner, "_uncaptured", uncaptured)
    executable = made("llama", monkeypatch)
    a, b, c, d = (take_slot(executable, 12) for _ in range(4))
    for slot in (a, b):
        executable.step(Step(prompts=(PrefillChunk(slot, 0, PROMPTS[0], chooses=True),)))
    one = (PrefillChunk(c, 0, PROMPTS[2][:4]),)
    both = (
        PrefillChunk(c, 4, PROMPTS[2][4:], chooses=True),
        PrefillChunk(d, 0, PROMPTS[3], chooses=True),
    )
    found = [executable.step(Step(decode=(a, b), prompts=each)) for each in (one, both)]
    limits = replace(executable.capabilities, most_shared=64, passes=((3, (64,)),))
    monkeypatch.setattr(executable, "capabilities", limits)
    for count, rides in ((64, True), (65, False)):
        step = Step(decode=(a, b), prompts=(chunk(c, 0, count),))
        assert executable._rides(step) == rides, "what is longer than any pass runs apart"
    assert [each.is_mixed for each in found] == [True, False]
    assert [part.slots for part in found[1].parts] == [(a, b), (c, d)]


def test_a_step_whose_tokens_are_chosen_late_is_of_two_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executable = made("llama", monkeypatch)
    slot, other = (take_slot(executable, 12) for _ in range(2))
    executable.step(Step(prompts=(PrefillChunk(slot, 0, PROMPTS[0], chooses=True),)))
    both = {"decode": (slot,), "prompts": (PrefillChunk(other, 0, PROMPTS[1], chooses=True),)}
    asked = executable.step(Step(**both, logprobs=1))
    assert not asked.is_mixed and [part.slots for part in asked.parts] == [(slot,), (other,)]
    release(executable, (other,))
    other = take_slot(executable, 12)
    both["prompts"] = (PrefillChunk(other, 0, PROMPTS[1], chooses=True, echoes=True),)
    echoed = executable.step(Step(**both, logprobs=1))
    assert not echoed.is_mixed, "an echo runs alone"


def test_rows_ride_along_only_where_nothing_is_promised_of_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_sharing(monkeypatch)
    plan = lower_to_program(lowered(tiny_model(), target="cuda", precision=precision_of("bf16"))[0])
    options = CompileOptions(max_batch=4, max_context=128)

    def limits(options: CompileOptions) -> Capabilities:
        return device.capabilities_of(plan, options, CPU, 8, has_cpp=False)

    assert limits(options).passes and limits(options).max_prompts == 8
    assert limits(options).alignment == 1
    assert not limits(replace(options, max_batch=1)).passes, "no other sequence decodes"
    assert not limits(replace(options, compute="exact")).passes
    two = replace(options, parallel=ParallelConfig(tensor=2))
    assert limits(two).passes == limits(options).passes
    assert not limits(replace(two, compute="exact")).passes
    monkeypatch.setattr(device, "invariant_of", lambda *_: "rows")
    assert not limits(options).passes
    monkeypatch.undo()
    monkeypatch.setattr(device, "has_mixers", lambda _: True)
    assert not limits(options).passes, "a CPU gains nothing by it"
    monkeypatch.setattr(device, "shares_passes_on", lambda _: True)  # sizes of a device
    assert limits(options).passes == ((4, (64, 256, 512, 1024, 2048)),)


def test_a_context_counts_by_the_work_it_makes() -> None:
    """In an 8B model, attention over about 8,000 positions costs as much as the matmuls."""
    plan = lower_to_program(lowered(tiny_model(), target="cuda", precision=precision_of("bf16"))[0])
    products = sum(rows * columns for rows, columns in (p.weight.shape for p in plan.products[:-1]))
    attends = [each for each in plan.instructions if isinstance(each, AttentionOp)]
    width = attends[0].num_heads * attends[0].state.shape[-1]
    assert far_of(plan) == int(0.28 * products / (2 * width * len(attends)))


def logits_beside(
    executable: Executable,
    num_rows: int,
    context: int,
    count: int,
    num_prompts: int = 3,
    *,
    is_mixed: bool = True,
) -> torch.Tensor:
    """Decode known tokens without prompts, with two chunks per prompt, and again without prompts.

    Return all logits.

    Args:
        is_mixed: Whether rows and chunks share a step.
    """
    found: list[torch.Tensor] = []
    rows = tuple(take_slot(executable, context + 4) for _ in range(num_rows))
    others = {
        take_slot(executable, count): tuple(random_tokens(count, seed=n))
        for n in range(num_prompts)
    }
    for index, slot in enumerate(rows):
        tokens = tuple(random_tokens(context - index % 7, seed=index))
        executable.step(Step(prompts=(PrefillChunk(slot, 0, tokens),)))
    forced = {slot: 1 + slot % 50 for slot in rows}
    for start, end in ((0, 0), (0, 64), (64, count), (0, 0)):
        chunks = tuple(
            PrefillChunk(slot, start, tokens[start:end], chooses=end == count)
            for slot, tokens in others.items()
            if end
        )
        step = Step(decode=rows, prompts=chunks, forced=forced, want_logits=True)
        steps = [step]
        if chunks and not is_mixed:
            steps = [replace(step, prompts=()), Step(prompts=chunks, want_logits=True)]
        for each in steps:
            output = executable.step(each)
            assert output.is_mixed == bool(end and is_mixed and executable.capabilities.passes)
            if output.parts:
                found.append(joined(output))
    release(executable, (*rows, *others))
    return torch.cat(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "num_rows"), [("bf16", 5), ("bf16", 80), ("bfp8", 80)])
def test_rows_ride_along_on_the_device(
    weights: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head sizes are for the device's attention.

    Logits equal separate steps up to bf16 rounding.
    """
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "head_dim": 64}
    model, found = tiny_model(std=0.05, max_positions=1024, **size), []
    options = {"compute": "fast", "max_batch": num_rows + 3, "max_context": 512}
    for is_on in (False, True):
        set_sharing(monkeypatch, is_on)
        executable = compiled(model, "cuda", precision=precision_of(weights), **options)
        found.append(logits_beside(executable, num_rows, context=200, count=300))
        executable.close()
    check_alike(*found)


def one_after_the_other(self: SideStream, first: Any, second: Any) -> None:
    first()
    second()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bf16", "bfp8"])
@pytest.mark.parametrize("is_captured", [True, False])
def test_rows_beside_prompts_have_the_bits_of_rows_behind_them(
    weights: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a side stream, with and without captured graphs."""
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "head_dim": 64}
    model, found = tiny_model(std=0.05, max_positions=1024, **size), []
    options = {"compute": "fast", "max_batch": 23, "max_context": 512}
    if not is_captured:
        monkeypatch.setattr(Buckets, "batch", lambda *_: None)
    run_beside = SideStream.run
    for run in (one_after_the_other, run_beside):
        monkeypatch.setattr(SideStream, "run", run)
        executable = compiled(model, "cuda", precision=precision_of(weights), **options)
        for _ in range(3):
            found.append(logits_beside(executable, 20, context=200, count=300))
        executable.close()
    assert all(torch.equal(found[0], each) for each in found)


def check_alike(apart: torch.Tensor, mixed: torch.Tensor, *, most: float = 0.05) -> None:
    """Compare within bfloat16 rounding: ``most`` standard deviations."""
    assert apart.isfinite().all() and mixed.isfinite().all()
    assert float((mixed - apart).abs().max()) < most * float(apart.std())
