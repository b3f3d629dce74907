"""What steps are expected to take: learnt from those that were measured."""

from __future__ import annotations

import pytest

from tests.runtime.queued import Clock, QueuedExecutable
from tilewright.compiler.runtime import loop as loop_module
from tilewright.compiler.runtime.cost import StepCost, StepMeter
from tilewright.compiler.runtime.loop import EngineLoop
from tilewright.compiler.runtime.request import Request
from tilewright.compiler.runtime.running import Policy
from tilewright.compiler.runtime.sampling import SamplingParams


def test_two_lines_are_found_and_a_slower_machine_is_believed_soon() -> None:
    cost = StepCost()
    assert cost.decode(4) == 0.0 and cost.tokens_within(20.0) is None
    for rows, tokens in ((1, 0), (8, 0), (0, 128), (0, 512), (4, 256), (8, 64)):
        cost.measure(
            rows, tokens, (3 + 0.5 * rows) * (rows > 0) + (2 + 0.1 * tokens) * (tokens > 0)
        )
    assert cost.decode(4) == pytest.approx(5.0)
    assert cost.prompts(100) == pytest.approx(12.0)
    assert cost.tokens_within(22.0) == pytest.approx(200, abs=1)
    cost.measure(0, 128, 10_000.0)
    assert cost.prompts(128) < 40.0, "a hiccup"
    for _ in range(150):
        for tokens in (128, 256):
            cost.measure(0, tokens, 4 + 0.2 * tokens)
    assert cost.prompts(200) == pytest.approx(44.0, rel=0.1)


def test_of_counts_that_are_alike_nothing_is_promised_of_others() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.measure(2, 0, 6.0)
        cost.measure(0, 100, 10.0)
    assert cost.decode(64) == 6.0 and cost.prompts(200) == pytest.approx(20.0)


def test_rows_that_ride_along_with_prompts_are_told_apart_from_rows_alone() -> None:
    """Each is what it adds: 0.02 ms a token, 0.05 a row, and 2 of a pass that both share."""
    cost = StepCost()
    for _ in range(3):
        cost.measure(64, 0, 7.5)
        for tokens in (64, 256, 1024):
            cost.measure(0, tokens, 2 + 0.02 * tokens)
    assert cost.beside(64) == pytest.approx(7.5), "as alone, while it is not known"
    for _ in range(60):
        for rows, tokens in ((64, 448), (16, 448), (64, 192), (16, 960)):
            cost.measure(rows, tokens, 2 + 0.02 * tokens + 0.05 * rows, is_mixed=True)
    for rows, tokens in ((64, 448), (16, 960)):
        expected = 2 + 0.02 * tokens + 0.05 * rows
        assert cost.prompts(tokens) + cost.beside(rows) == pytest.approx(expected, rel=0.05)
    assert cost.decode(64) == pytest.approx(7.5) and cost.beside(64) < 5.0


def test_the_first_pass_of_both_is_measured_where_prompts_are_not() -> None:
    cost = StepCost()
    cost.measure(4, 0, 5.0)
    cost.measure(4, 100, 9.0, is_mixed=True)
    assert (cost.prompts(100), cost.beside(4)) == (4.0, 5.0)


def test_a_reading_is_of_the_rows_it_waits_for_and_of_the_prompts_behind_the_last_ones() -> None:
    found: list[tuple[int, int, float]] = []

    class Heard(StepCost):
        def measure(
            self, num_rows: int, num_tokens: float, ms: float, *, is_mixed: bool = False
        ) -> None:
            found.append((num_rows, num_tokens, round(ms, 3)))

    meter = StepMeter(Heard())
    meter.begin(1.0)
    meter.read(2, 100, 1.002, are_prompts_read=False, is_read=True)
    meter.read(2, 50, 1.012, are_prompts_read=True, is_read=True)
    meter.read(0, 30, 1.012, are_prompts_read=False, is_read=False)
    meter.read(3, 0, 1.020, are_prompts_read=False, is_read=True)
    assert found == [(2, 0, 2.0), (2, 150, 10.0), (3, 30, 8.0)]


@pytest.mark.parametrize(("step_ms", "piece"), [(1.0, 4), (8.0, 8), (0.0, 40)])
def test_pieces_beside_streams_are_as_long_as_they_may_take(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, piece: int
) -> None:
    """A millisecond a token, so that whole cells of 4 fit into what is allowed."""

    class Priced(QueuedExecutable):
        def step(self, step: object) -> object:
            tokens = sum(len(chunk.tokens) for chunk in step.prompts)
            self.clock.now += 1e-3 * tokens + 1e-4 * bool(step.decode)
            return super().step(step)

    executable = Priced(clock=(clock := Clock()), runs_ahead=False, cell=4)
    monkeypatch.setattr(loop_module.time, "perf_counter", clock)
    loop = EngineLoop(executable, policy=Policy(step_ms=step_ms, reuses=False))
    loop.warm_up()
    executable.given.clear()
    loop.add(Request(0, (1, 2), SamplingParams(max_tokens=40)))
    for _ in range(3):
        loop.step()
    loop.add(Request(1, (3,) * 40, SamplingParams(max_tokens=1)))
    loop.generate([])
    pieces = [len(c.tokens) for step in executable.given for c in step.prompts if len(c.tokens) > 2]
    assert pieces[0] == piece and sum(pieces) == 40
