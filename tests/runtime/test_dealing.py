"""Prefill chunk sizes from expected times while other requests decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.queued import Clock, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    PrefillChunk,
    SampledTokens,
    SamplerOutput,
    Slot,
    Step,
    StepOutput,
)
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.prefill_scheduler import PrefillScheduler
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel

LIKE_CUDA: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_context": 66_000,
    "page_size": 64,
    "num_pages": 4096,
    "cell": 256,
    "max_prompts": 8,
    "runs_ahead": True,
}
FAR = 8192
PASSES = tuple((rows, (64, 128, 256, 512, 768, 1024)) for rows in (16, 64, 272))
A_TOKEN, A_ROW, A_PASS = 0.0235, 0.0575, 1.0


def known_cost() -> StepCostModel:
    """Return the time of an 8B model on a large GPU, for decode rows only and in mixed batches."""
    cost = StepCostModel()
    for _ in range(3):
        for rows in (1, 64, 256):
            cost.measure(rows, 0, 4.0 + 0.055 * rows)
        for tokens in (64, 256, 1024):
            cost.measure(0, tokens, A_PASS + A_TOKEN * tokens)
    for _ in range(9):
        for rows in (8, 64, 256):
            for tokens in (64, 128, 256, 512, 768, 1024):
                took = A_PASS + A_TOKEN * tokens + A_ROW * rows
                cost.measure(rows, tokens, took, is_mixed=True)
    return cost


def dealer(step_ms: float = 20.0, **changes: Any) -> PrefillScheduler:
    return PrefillScheduler(
        Capabilities(**{**LIKE_CUDA, **changes}), SchedulerConfig(step_ms=step_ms), known_cost()
    )


def prompt(left: int, computed: int = 0, number: int = 0) -> RequestState:
    request = RequestState(number, (1,) * (computed + left), SamplingParams(max_tokens=1))
    request.order = number
    request.take_slot(Slot(number), num_cached=computed, max_num_computed=computed)
    return request


@pytest.mark.parametrize(
    ("rows", "waiting", "expected"),
    [
        (8, 64, 64),
        (8, 100, 128),
        (8, 300, 256),
        (8, 400, 512),
        (8, 1024, 768),
        (64, 2100, 768),
        (8, 60_000, 768),
        (256, 60_000, 256),
    ],
)
def test_rows_share_passes_with_as_much_as_lets_through_what_waits(
    rows: int, waiting: int, expected: int
) -> None:
    assert dealer(passes=PASSES).shared(rows, PASSES[0][1], waiting) == expected


@given(st.integers(1, 256), st.integers(1, 100_000), st.sampled_from((5.0, 20.0, 40.0)))
def test_a_shared_pass_takes_no_longer_than_it_may(rows: int, waiting: int, step_ms: float) -> None:
    """The minimum chunk and decode rows may exceed the limit."""
    tokens = dealer(step_ms, passes=PASSES).shared(rows, PASSES[0][1], waiting)
    assert tokens in (64, 128, 256, 512, 768, 1024)
    allowed = 1.2 * max(step_ms, 4.0 + 0.055 * rows)
    assert tokens == 64 or A_PASS + A_TOKEN * tokens + A_ROW * rows <= 1.2 * allowed


CAPTURED = (
    (16, (64, 128, 256, 512, 784, 1024)),
    (64, (64, 192, 448, 720, 960)),
    (256, (64, 256, 528, 768)),
)


@given(st.integers(1, 255), st.lists(st.integers(1, 3000), min_size=1, max_size=12))
def test_what_is_dealt_beside_rows_is_a_pass_that_there_is(rows: int, lefts: list[int]) -> None:
    """More prompts wait than a mixed batch can finish."""
    made = dealer(max_num_seqs=512, passes=CAPTURED, far=FAR)
    found = made.deal([prompt(left, number=n) for n, left in enumerate(lefts)], rows)
    assert 1 <= len(found) <= 256 - rows
    sizes = next(sizes for width, sizes in CAPTURED if width >= rows + len(found))
    assert sum(count for _, count in found) <= sizes[-1]


def test_where_nobody_decodes_or_time_is_no_matter_steps_are_whole() -> None:
    assert dealer(passes=PASSES, far=FAR).budget(0) == 8192
    assert dealer(0.0, passes=PASSES, far=FAR).budget(64) == 8192
    ((_, count),) = dealer(passes=PASSES, far=FAR).deal([prompt(8192, 32_768)], 0)
    assert count == 8192


@pytest.mark.parametrize("mixes", [False, True])
@given(st.integers(0, 64_000), st.integers(1, 2000), st.integers(1, 256))
def test_pieces_far_into_a_prompt_take_no_longer_than_others(
    mixes: bool, computed: int, left: int, rows: int
) -> None:
    """The context counts too. The minimum chunk always runs."""
    made = dealer(passes=PASSES if mixes else (), far=FAR)
    start = computed // 64 * 64
    ((running, count),) = made.deal([prompt(left, start)], rows)
    weight = made.weigh((PrefillChunk(running.slot, start, (1,) * count),))
    assert weight == pytest.approx(count * (1 + (start + count / 2) / FAR))
    assert count == left or count % 64 == 0
    assert count == left or count >= 64
    assert A_TOKEN * weight <= 40.0 or count <= 256
    assert mixes or count <= made.budget(rows, start)


def test_what_is_left_of_a_step_goes_to_other_prompts() -> None:
    made = dealer(passes=PASSES, far=FAR)
    both = [prompt(64, 16_384), prompt(2000, number=1)]
    found = [(each.request_id, count) for each, count in made.deal(both, 64)]
    assert found == [(0, 64), (1, 192)], "where the first stands, a cell"
    both = [prompt(2000, 57_344), prompt(2000, number=1)]
    found = [(each.request_id, count) for each, count in made.deal(both, 64)]
    assert found == [(0, 64)], "64 tokens there are 500 at the beginning"


def test_a_piece_beside_rows_ends_where_its_state_is_kept() -> None:
    """A chunk with too many snapshots does not join a mixed batch.

    Without decode rows it is a single step.
    """
    one = prompt(1000, 64)
    one.saves |= {64, 960, 1024}
    made = dealer(0.0, passes=PASSES, max_prompts=1)
    for rows, expected in ((4, 960 - 64), (0, 1000)):
        ((_, count),) = made.deal([one], rows)
        assert count == expected
    for marks, expected in ((1, 1024 - 64), (2, 1000)):
        ((_, count),) = dealer(0.0, passes=PASSES, max_prompts=1, marks=marks).deal([one], 4)
        assert count == expected
    ((_, count),) = dealer(0.0, max_prompts=1).deal([one], 4)
    assert count == 1000, "nothing is shared"


LIKE_A_HYBRID: dict[str, Any] = {
    **{"cell": 1024, "max_prompts": 4, "marks": 2, "most_shared": 2048, "alignment": 64},
    "passes": tuple((rows, (64, 256, 512, 1024, 2048)) for rows in (16, 64)),
}


@pytest.mark.parametrize(
    ("lefts", "rows", "expected"),
    [
        ([1024, 1024], 16, [1024, 1024]),
        ([1010, 1010, 1010], 16, [1010, 1010]),
        ([1100, 1100], 1, [1100, 896]),
        ([1025], 16, [1024]),
        ([1500], 16, [1024]),
        ([1537], 16, [1537]),
        ([600], 16, [600]),
        ([100] * 6, 16, [100] * 4),
        ([8000, 64], 16, [2048]),
        ([1024, 1024, 64], 0, [1024, 1024]),
        ([1025, 1025], 0, [1025, 960]),
        ([8000, 64], 0, [8000]),
    ],
)
def test_prompts_that_share_a_pass_fill_it(
    lefts: list[int], rows: int, expected: list[int]
) -> None:
    """Without decode rows, prompts fill the largest batch.

    Smaller batches are used if their padding is less.
    """
    made = dealer(0.0, **LIKE_A_HYBRID)
    found = made.deal([prompt(left, number=n) for n, left in enumerate(lefts)], rows)
    assert [count for _, count in found] == expected


LARGER: dict[str, Any] = {
    **{**LIKE_A_HYBRID, "max_prompts": 8, "most_shared": 8192},
    "passes": ((16, (64, 256, 512, 1024, 2048)), (64, (64, 256, 512, 1024, 2048, 4096, 8192))),
}
"""Passes of more tokens, beside the most rows alone."""


@pytest.mark.parametrize(
    ("lefts", "rows", "expected"),
    [
        ([1024] * 10, 1, [1024] * 8),
        ([1024] * 10, 56, [1024] * 8),
        ([1024] * 10, 60, [1024] * 4),
        ([1024] * 10, 0, [1024] * 8),
        ([1040] * 10, 8, [1040] * 7 + [576]),
        ([1024] * 5, 8, [1024] * 4),
        ([1024] * 5, 0, [1024] * 4),
        ([1024] * 7, 8, [1024] * 7),
        ([1024] * 7, 0, [1024] * 7),
        ([1024] * 3, 8, [1024] * 2),
        ([1024] * 3, 0, [1024] * 3),
        ([1025, 64], 0, [1025, 64]),
        ([1025], 8, [1024]),
        ([20_000, 64], 8, [8192]),
        ([20_000, 64], 0, [8192]),
        ([5000], 0, [5000]),
    ],
)
def test_more_prompts_share_larger_passes_where_time_is_no_matter(
    lefts: list[int], rows: int, expected: list[int]
) -> None:
    """The number of batches is minimal without much padding."""
    made = dealer(0.0, **LARGER)
    found = made.deal([prompt(left, number=n) for n, left in enumerate(lefts)], rows)
    assert [count for _, count in found] == expected


@pytest.mark.parametrize(
    ("lefts", "rows", "expected"),
    [
        ([1024], 8, [1024]),
        ([1024], 60, [960]),
        ([64, 1024], 60, [64, 896]),
        ([1000], 100, [768]),
        ([1500], 200, [768]),
        ([1024, 1024], 8, [1024]),
        ([1024, 1024], 60, [1024, 1024]),
        ([1024] * 10, 60, [1024] * 8),
        ([8000], 60, [8000]),
        ([1024], 0, [1024]),
    ],
)
def test_short_prompts_of_dense_models_run_captured_batches(
    lefts: list[int], rows: int, expected: list[int]
) -> None:
    """Without a time limit, up to two captured batches replace a batch without a graph."""
    made = dealer(0.0, passes=CAPTURED)
    prompts = [prompt(left, number=n) for n, left in enumerate(lefts)]
    assert [count for _, count in made.deal(prompts, rows)] == expected


@pytest.mark.parametrize(
    ("limits", "most", "pieces"), [(LIKE_A_HYBRID, 2048, 4), (LARGER, 8192, 8)]
)
@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.sampled_from((0.0, 20.0, 60.0)),
)
def test_what_shares_a_pass_fits_into_the_largest(
    limits: dict[str, Any],
    most: int,
    pieces: int,
    rows: int,
    lefts: list[int],
    step_ms: float,
) -> None:
    made = dealer(step_ms, **limits)
    found = made.deal([prompt(left, number=n) for n, left in enumerate(lefts)], rows)
    assert 1 <= len(found) <= pieces
    assert sum(-(-count // 64) * 64 for _, count in found) <= most or not (rows or len(found) > 1)


class Timed(QueuedExecutable):
    """A device with times from :func:`known_cost`. Its logits are zeros."""

    longest = free_at = 0.0

    def step(self, step: Step) -> StepOutput:
        self.given.append(step)
        rows, chosen = len(step.decode), tuple(c.slot for c in step.prompts if c.chooses)
        is_mixed = bool(self.capabilities.passes and rows and step.prompts)
        rows_ms = (A_ROW * rows if is_mixed else 4.0 + 0.055 * rows) if rows else 0.0
        weights = [len(c.tokens) * (1 + (c.start + len(c.tokens) / 2) / FAR) for c in step.prompts]
        prompts_ms = A_PASS + A_TOKEN * sum(weights) if weights else 0.0
        if rows:
            self.longest = max(self.longest, rows_ms + prompts_ms)
        begins = max(self.free_at, self.clock.now)
        self.free_at = begins + 1e-3 * (rows_ms + prompts_ms)
        if is_mixed:
            return StepOutput((self._part((*step.decode, *chosen), self.free_at),), is_mixed=True)
        parts = [self._part(step.decode, begins + 1e-3 * rows_ms)] if rows else []
        return StepOutput((*parts, *([self._part(chosen, self.free_at)] if chosen else [])))

    def _part(self, slots: tuple[Slot, ...], done: float) -> SamplerOutput:
        def read() -> SampledTokens:
            self.clock.now = max(self.clock.now, done)
            return SampledTokens([0] * len(slots), [0] * len(slots))

        return SamplerOutput(slots, read)

    def reset(self) -> None:
        """Discard all measurements."""


@pytest.mark.parametrize("mixes", [False, True])
def test_a_long_prompt_beside_streams_makes_them_wait_for_no_long_step(
    mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with 64,000 tokens and 8 decoding requests: chunks shrink with the context, down to
    the minimum.
    """
    clock = Clock()
    monkeypatch.setattr(loop_module.time, "perf_counter", clock)
    executable = Timed(clock=clock, **LIKE_CUDA, passes=PASSES if mixes else (), far=FAR)
    loop = EngineLoop(executable, policy=SchedulerConfig(reuses=False))
    loop.warm_up()
    assert (loop.cost.shared(8, 448) is not None) == mixes and not executable.num_open
    for number in range(8):
        loop.add(RequestState(number, (1,) * 128, SamplingParams(max_tokens=2000)))
    for _ in range(8):
        loop.step()
    executable.longest, executable.given, longest = 0.0, [], 0.0
    long = RequestState(9, (1,) * 64_000, SamplingParams(max_tokens=1))
    loop.add(long)
    while not long.output:
        loop.step()
        if sum(len(c.tokens) for step in executable.given for c in step.prompts) < 16_384:
            longest = executable.longest
    assert longest < 29.0
    last = A_PASS + A_TOKEN * 256 * (1 + 64_000 / FAR) + 5.0
    assert executable.longest < (30.0 if mixes else last), "a quarter of a cell is taken where many"
    pieces = [len(chunk.tokens) for step in executable.given for chunk in step.prompts]
    assert pieces[0] >= 448 and sum(pieces) == 64_000 and min(pieces[:-1]) >= (64 if mixes else 192)


def test_deal_with_few_open_sequences_takes_one_prompt_and_shares_no_pass() -> None:
    """Output is batch-invariant up to `Capabilities.invariant_rows`."""
    limited = dealer(passes=PASSES, invariant="rows", invariant_rows=16)
    pending = [prompt(100, number=number) for number in range(4)]
    assert [count for _, count in limited.deal(list(pending), 12)] == [100]
    assert limited.deal(list(pending), 12) == dealer(max_prompts=1).deal(list(pending), 12)
    several = limited.deal(list(pending), 13)
    assert len(several) > 1 and several == dealer(passes=PASSES).deal(list(pending), 13)
