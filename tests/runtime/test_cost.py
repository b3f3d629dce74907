"""What steps are expected to take: learnt from those that were measured."""

from __future__ import annotations

import pytest

from tests.runtime.queued import Clock, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel, StepTimer


def test_two_lines_are_found_and_a_slower_machine_is_believed_soon() -> None:
    cost = StepCostModel()
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
    cost = StepCostModel()
    for _ in range(5):
        cost.measure(2, 0, 6.0)
        cost.measure(0, 100, 10.0)
    assert cost.decode(64) == 6.0 and cost.prompts(200) == pytest.approx(20.0)


def test_counts_that_all_take_as_long_promise_nothing_of_larger_ones() -> None:
    """What the host is slow to launch takes 28 ms whether it is of 64 tokens or of 512."""
    cost = StepCostModel()
    for _ in range(20):
        for tokens in (64, 256, 512):
            cost.measure(0, tokens, 28.0)
    assert cost.prompts(8192) > 300.0 and (cost.tokens_within(40.0) or 0) < 600


def test_a_pass_that_rows_share_takes_the_median_of_such_passes() -> None:
    passes = StepCostModel().passes
    assert passes.at(64, 256) is None
    for _ in range(5):
        for tokens in (128, 256, 1024):
            passes.measure(64, tokens, 2 + 0.02 * (64 + tokens))
    passes.measure(64, 256, 10_000.0)
    assert passes.at(64, 256) == pytest.approx(8.4), "a hiccup"
    assert passes.at(64, 512) == pytest.approx(8.4 * 576 / 320), "in proportion to a smaller one"
    assert passes.at(30, 700) == pytest.approx(8.4 * 730 / 320), "and no more than a larger one"
    for _ in range(5):
        passes.measure(64, 256, 12.0)
        passes.measure(64, 128, 9.0)
    assert passes.at(64, 256) == pytest.approx(12.0), "a slower machine is believed after a few"


def test_a_pass_that_nobody_tried_is_expected_to_take_what_its_tokens_add() -> None:
    """8B on an H200: 11.3 ms beside 77 rows are the weights' time, of which 128 tokens say little.
    In proportion 384 of them take 25 ms, so they would never be tried; they do take 16.4.
    """
    cost = StepCostModel()
    for rows, tokens in ((1, 0), (64, 0), (0, 256), (0, 1024)):
        cost.measure(rows, tokens, (4.2 + 0.045 * rows) * (rows > 0) + 0.025 * tokens)
    for _ in range(5):
        cost.measure(77, 128, 11.3, is_mixed=True)
    assert cost.passes.at(77, 384) == pytest.approx(11.3 * 461 / 205)
    assert cost.shared(77, 384) == pytest.approx(11.3 + 0.025 * 256, rel=0.01)
    assert cost.shared(90, 128) == pytest.approx(11.3 * 218 / 205), "about as large: in proportion"
    assert 11.3 >= (cost.shared(30, 64) or 0) > 11.3 * 94 / 205, "and a smaller one takes less"
    assert cost.shared(30, 64) == pytest.approx(11.3 - 0.025 * 64 - 0.045 * 47, rel=0.01)


def test_one_measurement_of_a_size_that_nobody_tries_again_does_not_stand() -> None:
    """The first pass of a size compiled something: it may be chosen again all the same."""
    passes = StepCostModel().passes
    passes.measure(64, 1024, 400.0)
    passes.measure(64, 256, 8.0)
    assert passes.at(64, 1024) == pytest.approx(8.0 * 1088 / 320)


def test_a_reading_is_of_the_rows_it_waits_for_and_of_the_prompts_behind_the_last_ones() -> None:
    found: list[tuple[int, int, float]] = []

    class Heard(StepCostModel):
        def measure(
            self,
            num_rows: int,
            num_tokens: float,
            ms: float,
            *,
            is_mixed: bool = False,
            has_drafts: bool = False,
        ) -> None:
            found.append((num_rows, num_tokens, round(ms, 3)))

    meter = StepTimer(Heard())
    meter.begin(1.0)
    meter.read(2, 100, 1.002, are_prompts_read=False, is_read=True)
    meter.read(2, 50, 1.012, are_prompts_read=True, is_read=True)
    meter.read(0, 30, 1.012, are_prompts_read=False, is_read=False)
    meter.read(3, 0, 1.020, are_prompts_read=False, is_read=True)
    assert found == [(2, 0, 2.0), (2, 150, 10.0), (3, 30, 8.0)]
    meter.read(0, 16, 6.0, are_prompts_read=False, is_read=False, has_capture=True)
    meter.read(1, 16, 6.01, are_prompts_read=True, is_read=True)
    assert len(found) == 3, "the capture was before an output was read"
    meter.read(1, 0, 6.02, are_prompts_read=True, is_read=True)
    assert found[3:] == [(1, 0, 10.0)]


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
    loop = EngineLoop(executable, policy=SchedulerConfig(step_ms=step_ms, reuses=False))
    loop.warm_up()
    assert executable.given and not loop.stats.found, "it is not counted"
    executable.given.clear()
    loop.add(RequestState(0, (1, 2), SamplingParams(max_tokens=40)))
    for _ in range(3):
        loop.step()
    loop.add(RequestState(1, (3,) * 40, SamplingParams(max_tokens=1)))
    loop.generate([])
    pieces = [len(c.tokens) for step in executable.given for c in step.prompts if len(c.tokens) > 2]
    assert pieces[0] == piece and sum(pieces) == 40
