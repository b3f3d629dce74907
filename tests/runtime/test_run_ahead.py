"""Running ahead: the same answers, the device never idle, and nothing read early."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.runtime.queued import VOCAB, Clock, QueuedExecutable
from tests.runtime.test_scheduler import answer
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.evaluate.measure.timing import figures
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED, STOPPED
from tilewright.runtime.scheduling.request_state import RequestState

NEVER = VOCAB + 1
"""An end token that is not chosen."""


def request(
    prompt: int = 3, wanted: int = 8, *, number: int = 0, ends: tuple[int, ...] = ()
) -> RequestState:
    tokens = tuple((5 * number + at) % VOCAB for at in range(prompt))
    return RequestState(
        number, tokens, SamplingParams(seed=number, max_tokens=wanted, stop_token_ids=ends)
    )


def whole_answer(made: RequestState) -> list[int]:
    """What the request is answered on its own, end tokens or not."""
    params = SamplingParams(seed=made.sampling.seed, max_tokens=made.sampling.max_tokens)
    return answer(RequestState(0, made.prompt, params))


def first_new(tokens: list[int], least: int = 2) -> int:
    """A place from ``least`` on whose token does not occur before it."""
    return next(at for at in range(least, len(tokens)) if tokens[at] not in tokens[:at])


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    executable = QueuedExecutable()
    EngineLoop(executable).generate([request(wanted=4)])
    assert executable.log == [
        ("launch", 0),
        ("launch", 1),  # it decodes what the prompt chooses, before the host has seen it
        ("read", 0),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("read", 3),  # no fourth decode step: the request has all its tokens then
    ]


def test_an_executable_that_does_not_run_ahead_is_read_step_by_step() -> None:
    executable = QueuedExecutable(runs_ahead=False)
    EngineLoop(executable).generate([request(wanted=4)])
    assert executable.log == [(what, n) for n in range(4) for what in ("launch", "read")]


def test_who_decodes_is_the_same_object_while_nobody_comes_or_goes() -> None:
    executable = QueuedExecutable(max_prompts=3)
    EngineLoop(executable).generate([request(number=n, wanted=9) for n in range(3)])
    decodes = [step for step in executable.given if step.decode]
    assert len(decodes) == 8
    for one, other in pairwise(decodes):
        assert one.decode is other.decode and not other.edits and not other.forced


def test_an_end_token_ends_the_request_and_the_flight_is_waited_for() -> None:
    wanted = whole_answer(request(wanted=20))
    at = first_new(wanted)
    executable = QueuedExecutable()
    llm, stopped = EngineLoop(executable), request(wanted=20, ends=(wanted[at], NEVER))
    llm.generate([stopped])
    assert stopped.output == wanted[: at + 1]
    assert stopped.finish_reason == STOPPED
    assert len(stopped.token_times) == len(stopped.output)
    assert executable.log[-2:] == [("read", at), ("read", at + 1)], "one step too many was run"
    assert llm.num_dropped == 1 and executable.num_open == llm.scheduler.num_kept == 1


def test_the_others_keep_the_flight_of_one_that_ended() -> None:
    made = [request(number=n, wanted=15) for n in range(3)]
    alone = [whole_answer(one) for one in made]
    at = first_new(alone[1])
    executable = QueuedExecutable(max_prompts=3)
    made[1] = request(number=1, wanted=15, ends=(alone[1][at],))
    EngineLoop(executable).generate(made)
    assert [one.output for one in made] == [alone[0], alone[1][: at + 1], alone[2]]
    sizes = [len(step.decode) for step in executable.given if step.decode]
    assert sizes == [3] * (at + 1) + [2] * (13 - at), "nothing was computed twice"


def test_a_newcomer_is_admitted_while_a_step_is_in_flight() -> None:
    executable = QueuedExecutable()
    llm, first, second = EngineLoop(executable), request(wanted=12), request(number=1, wanted=3)
    llm.add(first)
    for _ in range(3):
        llm.step()
    llm.add(second)
    served = [[one.request_id for one in llm.step()] for _ in range(3)]
    assert served == [[0], [0, 1], [0, 1]], "the stream does not wait for the prompt"
    llm.generate([])
    assert (first.output, second.output) == (answer(first), answer(second))


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_cancelled_in_flight_leaves_the_others_alone(others: int) -> None:
    executable = QueuedExecutable()
    llm = EngineLoop(executable)
    made = [request(number=n, wanted=10) for n in range(1 + others)]
    for one in made:
        llm.add(one)
    for _ in range(len(made) + 2):
        llm.step()
    kept = list(made[0].output)
    llm.cancel(made[0])
    assert made[0].finish_reason == CANCELLED
    llm.generate([])
    assert made[0].output == kept == answer(made[0])[: len(kept)]
    assert all(one.output == answer(one) for one in made[1:])
    assert executable.num_open == llm.scheduler.num_kept


@pytest.mark.parametrize(("runs_ahead", "rate"), [(True, 1 / 0.010), (False, 1 / 0.014)])
def test_the_device_does_not_wait_for_the_host(
    runs_ahead: bool, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 ms on the device and 4 ms on the host come to 10 ms a step; times are when a token is
    read, so the rate of a timed run is the device's.
    """
    clock = Clock()
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=clock))
    executable = QueuedExecutable(clock=clock, runs_ahead=runs_ahead, max_prompts=2)
    executable.step_seconds, executable.host_seconds = 0.010, 0.004
    made = [request(number=n, wanted=30) for n in range(2)]
    EngineLoop(executable).generate(made)
    repeat = figures(made, 0.0)
    assert repeat.decode_tsu == pytest.approx(rate)
    steps = [later - earlier for earlier, later in pairwise(made[1].token_times[1:])]
    assert steps == [pytest.approx(1 / rate)] * len(steps)
