"""Figures from hand-made token times, and what a timed run does with its jobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.runtime.queued import QueuedExecutable
from tests.tiny import compiled, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.measure.timing import TimedRequest, figures, time_jobs
from tilewright.runtime.scheduling.request_state import RequestState


def finished(prompt: int, times: Sequence[float]) -> RequestState:
    """A request that got a token at each of these times."""
    request = RequestState(0, (1,) * prompt)
    request.token_times = list(times)
    request.output = [7] * len(times)
    return request


def test_one_user_by_hand() -> None:
    """Queued at 100 s; the first token after 0.5 s; a slow first decode step, then 0.1 s each."""
    repeat = figures([finished(40, [100.5, 101.5, 101.6, 101.7, 101.8])], 100.0)
    assert repeat.ttft_ms == pytest.approx(500)
    assert repeat.prefill_tps == pytest.approx(80)
    assert repeat.decode_tsu == pytest.approx(10), "the step of 1 s does not count"
    assert repeat.tps == pytest.approx(4 / 1.3), "here it does"
    assert repeat.ttft_first_ms is repeat.ttft_median_ms is repeat.ttft_last_ms is None


def test_the_first_decode_step_does_not_change_the_rate() -> None:
    quick, slow = (
        figures([finished(10, [1.0, 1.0 + first, 1.2 + first, 1.4 + first])], 0.0)
        for first in (0.001, 9.0)
    )
    assert quick.decode_tsu == pytest.approx(5)
    assert slow.decode_tsu == pytest.approx(5)
    assert quick.tps is not None and slow.tps is not None and quick.tps > 5 * slow.tps


def test_a_batch_by_hand() -> None:
    """TTFT is the time of all prefills divided by the users; rates are means over users."""
    requests = [
        finished(10, [2.0, 5.0, 5.5, 6.0]),  # 2 steps in 1 s
        finished(20, [3.0, 5.0, 5.25, 5.5, 5.75, 6.0]),  # 4 steps in 1 s
        finished(30, [4.0, 5.0]),  # no step that counts
    ]
    repeat = figures(requests, 1.0)
    assert repeat.ttft_ms == pytest.approx(1000), "3 s for 3 users"
    assert repeat.prefill_tps == pytest.approx(20), "60 tokens in 3 s"
    assert repeat.decode_tsu == pytest.approx(3)
    assert repeat.tps == pytest.approx((3 + 5 + 1) / 2), "from the last first token to the end"
    assert repeat.ttft_first_ms == pytest.approx(1000)
    assert repeat.ttft_median_ms == pytest.approx(2000)
    assert repeat.ttft_last_ms == pytest.approx(3000)


@pytest.mark.parametrize("count", [1, 2])
def test_rates_that_do_not_exist_are_absent(count: int) -> None:
    repeat = figures([finished(5, [2.0, 3.0][:count])], 1.0)
    assert repeat.ttft_ms == pytest.approx(1000)
    assert repeat.decode_tsu is None
    assert repeat.tps == (None if count == 1 else pytest.approx(1))


class Served:
    """What a timed run asked of the null target, seen through its callback."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.heard: list[tuple[int, int, tuple[int, ...]]] = []

    def on_token(self, repeat: int, request: RequestState, token: int) -> None:
        self.heard.append((repeat, request.request_id, request.prompt))


@pytest.fixture
def served() -> Served:
    return Served(compiled(tiny_model(num_layers=1), "null", max_batch=3))


def make_jobs(*wanted: int) -> list[TimedRequest]:
    return [
        TimedRequest(tuple(random_tokens(3 + index, seed=index)), SamplingParams(max_tokens=count))
        for index, count in enumerate(wanted)
    ]


def test_jobs_run_as_often_as_asked_after_a_warm_up(served: Served) -> None:
    jobs = make_jobs(5, 2, 12)
    runs = time_jobs(served.executable, jobs, num_repeats=2, on_token=served.on_token)
    assert len(runs) == 2
    for run in runs:
        assert [len(output) for output in run.outputs] == [5, 2, 12]
        assert run.repeat.ttft_ms is not None and run.repeat.ttft_ms > 0
    assert [repeat for repeat, _, _ in served.heard] == [0] * 19 + [1] * 19, "warm-up is not heard"
    # 8 steps of warm-up (12 tokens become 8), 12 of each repeat: the null target mixes phases
    assert served.executable.num_steps == 8 + 2 * 12  # type: ignore[attr-defined]


def test_rotation_hands_each_prompt_to_the_next_user(served: Served) -> None:
    jobs = make_jobs(1, 2, 3)
    runs = time_jobs(served.executable, jobs, num_repeats=4, rotate=True, on_token=served.on_token)
    prompts = [job.prompt for job in jobs]
    seen = {(repeat, user): prompts.index(prompt) for repeat, user, prompt in served.heard}
    assert seen == {(n, user): (user + n) % 3 for n in range(4) for user in range(3)}
    for run in runs:
        assert [len(output) for output in run.outputs] == [1, 2, 3], (
            "in the jobs' order all the same"
        )


def test_without_rotation_every_user_keeps_its_prompt(served: Served) -> None:
    jobs = make_jobs(1, 1, 1)
    time_jobs(served.executable, jobs, num_repeats=3, on_token=served.on_token)
    assert {(user, prompt) for _, user, prompt in served.heard} == {
        (user, job.prompt) for user, job in enumerate(jobs)
    }


def test_no_figure_comes_from_a_cache() -> None:
    """Four users with one prompt, thrice: each computes all of it."""
    executable = QueuedExecutable(page_size=4, num_pages=64, runs_ahead=False)
    job = TimedRequest(tuple(range(20)), SamplingParams(max_tokens=3))
    time_jobs(executable, [job] * 4, num_repeats=2)
    computed = sum(len(chunk.tokens) for step in executable.given for chunk in step.prompts)
    assert computed == 3 * 4 * 20
