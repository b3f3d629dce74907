"""Running ahead: the same answers, the device never idle, and no state freed under a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.queued import VOCAB, Clock, QueuedExecutable
from tilewright.compiler.bench.timing import figures
from tilewright.compiler.runtime import llm as llm_module
from tilewright.compiler.runtime.batch import Piece, build_step, sampling_batch
from tilewright.compiler.runtime.engine import Engine
from tilewright.compiler.runtime.llm import LLM
from tilewright.compiler.runtime.request import CANCELLED, LENGTH, STOPPED, Request, SamplingParams
from tilewright.compiler.runtime.scheduler import PREFILL_CHUNK

NEVER = VOCAB + 1
"""An end token that is not chosen."""


def request(
    prompt: int = 3, wanted: int = 8, *, number: int = 0, ends: tuple[int, ...] = ()
) -> Request:
    tokens = tuple((5 * number + at) % VOCAB for at in range(prompt))
    return Request(number, tokens, SamplingParams(seed=number, max_tokens=wanted, end_tokens=ends))


def answer(made: Request) -> list[int]:
    """What the request is answered on its own, an end token or not."""
    params = SamplingParams(seed=made.sampling.seed, max_tokens=made.sampling.max_tokens)
    alone = Request(0, made.prompt, params)
    LLM(QueuedExecutable(runs_ahead=False)).generate([alone])
    return alone.output


def first_new(tokens: list[int], least: int = 2) -> int:
    """A place from ``least`` on whose token does not occur before it."""
    return next(at for at in range(least, len(tokens)) if tokens[at] not in tokens[:at])


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    executable = QueuedExecutable()
    LLM(executable).generate([request(wanted=5)])
    assert executable.log == [
        ("launch", 0),
        ("read", 0),  # the prompt's token
        ("launch", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("launch", 4),
        ("read", 3),
        ("read", 4),  # no fifth decode step: the request has all its tokens then
    ]


def test_an_executable_that_does_not_run_ahead_is_read_step_by_step() -> None:
    executable = QueuedExecutable(runs_ahead=False)
    LLM(executable).generate([request(wanted=4)])
    assert executable.log == [(what, n) for n in range(4) for what in ("launch", "read")]
    assert all(inputs.previous is None and not inputs.advanced for inputs in executable.given)


def test_following_steps_bring_no_tensor_of_their_own() -> None:
    executable = QueuedExecutable()
    LLM(executable).generate([request(number=n, wanted=9) for n in range(3)])
    first, *rest = [inputs for inputs in executable.given if len(inputs.states) == 3]
    assert [inputs.advanced for inputs in rest] == list(range(1, 8))
    for inputs in rest:
        for name in ("tokens", "positions", "cu_seqlens", "logit_rows", "states", "sampling"):
            assert getattr(inputs, name) is getattr(first, name)
    assert executable.num_continued == len(rest)


def test_an_end_token_ends_the_request_and_the_flight_is_waited_for() -> None:
    made = request(wanted=20)
    wanted = answer(made)
    at = first_new(wanted)
    executable = QueuedExecutable()
    stopped = request(wanted=20, ends=(wanted[at], NEVER))
    LLM(executable).generate([stopped])
    assert stopped.output == wanted[: at + 1]
    assert stopped.finish_reason == STOPPED
    assert len(stopped.token_times) == len(stopped.output)
    assert stopped.num_computed == len(stopped.prompt) + at
    assert stopped.state is None and executable.num_free() == 4
    assert executable.log[-2:] == [("read", at), ("read", at + 1)], "one step too many was run"


def test_the_others_keep_the_flight_of_one_that_ended() -> None:
    made = [request(number=n, wanted=15) for n in range(3)]
    alone = [answer(one) for one in made]
    at = first_new(alone[1])
    executable = QueuedExecutable()
    made[1] = request(number=1, wanted=15, ends=(alone[1][at],))
    LLM(executable).generate(made)
    assert [one.output for one in made] == [alone[0], alone[1][: at + 1], alone[2]]
    decodes = [inputs for inputs in executable.given if len(inputs.states) in (2, 3)]
    assert [len(inputs.states) for inputs in decodes] == [3] * (at + 1) + [2] * (13 - at)
    assert len(executable.given) == 3 + 14, "nothing was computed twice"


def test_a_flight_is_read_before_a_newcomer_is_admitted() -> None:
    executable = QueuedExecutable()
    llm, first, second = LLM(executable), request(wanted=12), request(number=1, wanted=3)
    llm.add(first)
    for _ in range(3):
        llm.step()
    assert executable.log[-2:] == [("launch", 3), ("read", 2)]
    llm.add(second)
    assert llm.step() == [first] and executable.log[-1] == ("read", 3)
    assert llm.step() == [second]
    llm.generate([])
    assert (first.output, second.output) == (answer(first), answer(second))


def test_who_waits_for_a_state_does_not_keep_the_others_from_running_ahead() -> None:
    executable = QueuedExecutable(max_batch=1)
    made = [request(wanted=6), request(number=1, wanted=6)]
    LLM(executable).generate(made)
    assert [one.output for one in made] == [answer(one) for one in made]
    assert executable.num_continued == 2 * 4


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_cancelled_in_flight_gives_its_state_back_after_it(others: int) -> None:
    executable = QueuedExecutable()
    llm = LLM(executable)
    made = [request(number=n, wanted=10) for n in range(1 + others)]
    for one in made:
        llm.add(one)
    for _ in range(len(made) + 2):
        llm.step()
    kept = list(made[0].output)
    assert executable.log[-2][0] == "launch"
    llm.cancel(made[0])
    assert made[0].finish_reason == CANCELLED and made[0].state is None
    assert executable.num_free() == (3 - others if others else 4), "freed once it has landed"
    llm.generate([])
    assert made[0].output == kept == answer(made[0])[: len(kept)]
    assert made[0].num_computed == len(made[0].prompt) + len(kept) - 1
    assert all(one.output == answer(one) for one in made[1:])
    assert executable.num_free() == 4


def test_steps_of_others_in_between_are_noticed() -> None:
    """A second user of the executable: the next step is no continuation of the last, and right."""
    executable = QueuedExecutable()
    llm, first = LLM(executable), request(wanted=9)
    llm.add(first)
    for _ in range(3):
        llm.step()
    other = request(number=1)
    handle = executable.reserve(8)
    piece = Piece(handle, list(other.prompt), 0, True)
    executable.step(build_step([piece], sampling=sampling_batch([other]))).read()
    llm.generate([])
    assert first.output == answer(first)
    executable.free(handle)
    assert executable.num_continued == 6, "of 7 following steps"


@dataclass(frozen=True, slots=True)
class Job:
    """Lengths, end tokens, the step before which it comes, and after how many tokens it is
    cancelled (0: never).
    """

    prompt: int
    wanted: int
    ends: tuple[int, ...]
    arrival: int
    cancel_after: int


JOBS = st.lists(
    st.builds(
        Job,
        prompt=st.integers(1, 12),
        wanted=st.integers(1, 12),
        ends=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        arrival=st.integers(0, 15),
        cancel_after=st.sampled_from((0, 0, 0, 1, 2, 5)),
    ),
    min_size=1,
    max_size=7,
)
LIMITS = st.fixed_dictionaries(
    {
        "max_batch": st.integers(1, 4),
        "mixed_steps": st.booleans(),
        "max_prefill_sequences": st.integers(1, 3),
        "prefill_chunk": st.integers(1, 8),
    }
)


def serve(
    jobs: list[Job], executable: QueuedExecutable, before_step: Callable[[LLM, int], None]
) -> list[Request]:
    """Run the jobs as they come; ``before_step(llm, step)`` may interfere."""
    made = [request(j.prompt, j.wanted, number=n, ends=j.ends) for n, j in enumerate(jobs)]
    llm, at = LLM(executable), 0
    coming = sorted(range(len(jobs)), key=lambda n: jobs[n].arrival)
    while coming or llm.scheduler.has_work():
        while coming and (jobs[coming[0]].arrival <= at or not llm.scheduler.has_work()):
            llm.add(made[coming.pop(0)])
        before_step(llm, at)
        at += 1
        for served in llm.step() if llm.scheduler.has_work() else []:
            if len(served.output) == jobs[served.request_id].cancel_after:
                llm.cancel(served)
    assert executable.num_free() == executable.capabilities.max_batch
    return made


@given(JOBS, LIMITS)
def test_running_ahead_changes_no_answer(jobs: list[Job], limits: dict[str, Any]) -> None:
    """The device's own checks: positions, reservations, one step ahead, no state freed early."""
    ahead, plain = (
        serve(jobs, QueuedExecutable(runs_ahead=runs, **limits), lambda llm, at: None)
        for runs in (True, False)
    )
    for one, other in zip(ahead, plain, strict=True):
        assert one.output == other.output
        assert one.finish_reason == other.finish_reason
        assert one.num_computed == other.num_computed
        assert len(one.token_times) == len(one.output)


@given(JOBS, LIMITS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=5))
def test_cancelling_at_any_time_leaves_the_others_alone(
    jobs: list[Job], limits: dict[str, Any], cancels: list[tuple[int, int]]
) -> None:
    def interfere(llm: LLM, at: int) -> None:
        known = [*llm.scheduler.running, *llm.scheduler.waiting]
        for step, number in cancels:
            for found in known if step == at else []:
                if found.request_id == number:
                    llm.cancel(found)

    found = serve(jobs, QueuedExecutable(**limits), interfere)
    for one in found:
        wanted = answer(one)
        assert one.output == wanted[: len(one.output)]
        ends = [at for at, token in enumerate(wanted) if token in one.sampling.end_tokens]
        if one.finish_reason == STOPPED:
            assert len(one.output) == ends[0] + 1
        elif one.finish_reason == LENGTH:
            assert len(one.output) == one.sampling.max_tokens and not ends
        else:
            assert one.finish_reason == CANCELLED


@pytest.mark.parametrize(("runs_ahead", "rate"), [(True, 1 / 0.010), (False, 1 / 0.014)])
def test_the_device_does_not_wait_for_the_host(
    runs_ahead: bool, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 ms on the device and 4 ms on the host come to 10 ms a step; times are when a token is
    read, so the rate of a timed run is the device's.
    """
    clock = Clock()
    monkeypatch.setattr(llm_module, "time", SimpleNamespace(perf_counter=clock))
    executable = QueuedExecutable(clock=clock, runs_ahead=runs_ahead)
    executable.step_seconds, executable.host_seconds = 0.010, 0.004
    made = [request(number=n, wanted=30) for n in range(2)]
    LLM(executable).generate(made)
    repeat = figures(made, 0.0)
    assert repeat.decode_tsu == pytest.approx(rate)
    steps = [later - earlier for earlier, later in pairwise(made[1].token_times[1:])]
    assert steps == [pytest.approx(1 / rate)] * len(steps)
    assert repeat.ttft_last_ms == pytest.approx(28), "two prompts, each read before the next"


def test_a_prompt_is_cut_as_the_executable_likes_it() -> None:
    executable = QueuedExecutable(prefill_chunk=4)
    LLM(executable).generate([request(prompt=10, wanted=1)])
    assert [len(inputs.tokens) for inputs in executable.given] == [4, 4, 2]
    asked = QueuedExecutable(prefill_chunk=4)
    LLM(asked, prefill_chunk=7).generate([request(prompt=10, wanted=1)])
    assert [len(inputs.tokens) for inputs in asked.given] == [7, 3]


def test_the_engine_cuts_a_prompt_as_the_executable_likes_it() -> None:
    wanted = {None: 4, 7: 7}
    for asked, chunk in wanted.items():
        assert Engine(QueuedExecutable(prefill_chunk=4), prefill_chunk=asked).prefill_chunk == chunk
    assert Engine(QueuedExecutable()).prefill_chunk == PREFILL_CHUNK
