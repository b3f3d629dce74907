"""Admission order: turns between clients, large requests, and prompts that wait for a prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.queued import QueuedExecutable
from tests.runtime.test_scheduler import answer
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import Slot
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.prefill_scheduler import PrefillScheduler
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.scheduler import HOLD_SECONDS, Scheduler
from tilewright.runtime.scheduling.waiting_queue import WaitingQueue


def asked(number: int, length: int = 4, wanted: int = 2, **facts: Any) -> RequestState:
    prompt = tuple((number + at) % 20 for at in range(length))
    return RequestState(number, prompt, SamplingParams(max_tokens=wanted), order=number, **facts)


def ids(line: WaitingQueue) -> list[int]:
    return [request.request_id for request in line]


def test_clients_take_turns_within_a_priority() -> None:
    line = WaitingQueue()
    clients = {1: "a", 2: "a", 3: "a", 4: "b", 5: "c", 6: "b"}
    made = {number: asked(number, client=client) for number, client in clients.items()}
    for request in made.values():
        line.add(request)
    line.add(urgent := asked(7, client="a", priority=-1))
    assert ids(line) == [7, 1, 4, 5, 2, 6, 3]
    assert line.leave(urgent) and line.leave(made[1]) and not line.leave(made[1])
    assert ids(line) == [4, 5, 2, 6, 3], "who was served is asked last"
    line.leave(made[4])
    line.put_back(made[4])
    line.put_back(made[1])
    assert ids(line) == [1, 4, 5, 2, 6, 3], "those who ran before come first, by arrival"
    assert len(line) == 6 and line.leave(made[4]) and len(line) == 5


def held(num_pages: int = 12) -> tuple[Scheduler, list[float], RequestState, RequestState]:
    """A running request has half the pages. The head of the queue needs more than the rest."""
    now = [0.0]
    limits = Capabilities(max_num_seqs=4, max_context=64, page_size=4, num_pages=num_pages, cell=4)
    scheduler = Scheduler(limits, now=lambda: now[0], policy=SchedulerConfig(reuses=False))
    running, large = asked(0, 20, 20), asked(1, 32, 2)
    for request in (running, large, asked(2), asked(3), asked(4, priority=1)):
        scheduler.add(request)
    scheduler.schedule()
    return scheduler, now, running, large


def test_one_that_does_not_fit_holds_back_others_and_lets_one_pass_at_times() -> None:
    scheduler, now, running, large = held()
    for _ in range(3):
        scheduler.schedule()
        assert [each.request_id for each in scheduler.running] == [0]
    now[0] = HOLD_SECONDS
    for _ in range(2):
        scheduler.schedule()
        assert [each.request_id for each in scheduler.running] == [0, 2], "one, and no more"
    scheduler.cancel(running)
    scheduler.schedule()
    assert large in scheduler.cache_manager.running


@pytest.mark.parametrize(("wanted", "pages", "running"), [(2, 8, 4), (6, 11, 4), (6, 10, 3)])
def test_a_page_is_kept_back_only_for_those_who_may_need_one(
    wanted: int, pages: int, running: int
) -> None:
    """A pool with exactly the pages for four requests admits four requests."""
    limits = Capabilities(max_num_seqs=4, max_context=16, page_size=4, num_pages=pages, cell=4)
    scheduler = Scheduler(limits, policy=SchedulerConfig(reuses=False))
    for number in range(4):
        scheduler.add(asked(number, 6, wanted))
    scheduler.schedule()
    assert len(scheduler.running) == running


@pytest.mark.parametrize(("page_size", "state"), [(0, 0), (4, 0), (0, 6), (4, 6)])
def test_prompts_that_arrive_together_compute_what_they_share_once(
    page_size: int, state: int
) -> None:
    facts: dict[str, Any] = {"page_size": page_size, "num_pages": 64 if page_size else 0}
    if state:
        facts |= {"has_sequence_state": True, "num_snapshots": state}
    executable = QueuedExecutable(max_prompts=3, max_step_tokens=16, **facts)
    loop = EngineLoop(executable)
    made = [RequestState(n, (*[1] * 24, n), SamplingParams(seed=n, max_tokens=3)) for n in range(3)]
    others = [RequestState(9, (*[1] * 24, 9), SamplingParams(max_tokens=3), cache_salt="other")]
    loop.generate([*made, *others])
    assert [request.num_cached for request in made] == [0, 24, 24]
    assert others[0].num_cached == 0, "another salt, another chain"
    assert [request.output for request in made] == [answer(request) for request in made]
    computed = sum(len(chunk.tokens) for step in executable.given for chunk in step.prompts)
    assert computed == 25 + 1 + 1 + 25


def test_nobody_waits_for_a_prompt_of_a_worse_priority() -> None:
    limits = Capabilities(max_num_seqs=4, max_context=64, cell=4, page_size=4, num_pages=64)
    scheduler = Scheduler(limits, policy=SchedulerConfig(step_tokens=4))
    made = [
        RequestState(n, (*[1] * 24, n), SamplingParams(max_tokens=2), at)
        for n, at in enumerate((1, 0, 1))
    ]
    scheduler.add(made[0])
    scheduler.schedule()
    for request in made[1:]:
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.running == made[:2]


def test_a_prompt_that_leaves_another_marks_where_for_those_who_follow() -> None:
    """With per-sequence state, the second request has no snapshot there and saves one for the
    third.
    """
    executable = QueuedExecutable(
        page_size=4, num_pages=64, has_sequence_state=True, num_snapshots=6
    )
    loop, found = EngineLoop(executable), []
    for last in (5, 6, 7):
        request = RequestState(0, (*[1] * 12, *[last] * 12), SamplingParams(max_tokens=2))
        loop.generate([request])
        assert request.output == answer(request)
        found.append(request.num_cached)
    assert found == [0, 0, 12]


@pytest.mark.parametrize("state", [0, 2, 6])
@pytest.mark.parametrize("shares", [False, True])
def test_the_next_turn_of_a_chat_finds_the_answer_before_it(state: int, shares: bool) -> None:
    """Reuse its full pages. With per-sequence state, reuse up to the last snapshot."""
    facts: dict[str, Any] = {"page_size": 4, "num_pages": 64}
    if state:
        facts |= {"has_sequence_state": True, "num_snapshots": state}
    loop = EngineLoop(QueuedExecutable(**facts), policy=SchedulerConfig(cache_replies=shares))
    prompt, found = (1,) * 11, []
    for turn in range(3):
        request = RequestState(turn, prompt, SamplingParams(seed=turn, max_tokens=11))
        loop.generate([request])
        assert request.output == answer(request)
        found.append(request.num_cached)
        prompt = (*prompt, *request.output, turn)
    assert found == ([0, 20, 32] if shares else [0, 8, 32 - 12])


def test_a_cancelled_answer_leaves_what_is_known_of_it_while_a_step_runs_ahead() -> None:
    """The unread token and its page are not reused."""
    limits = Capabilities(
        max_num_seqs=1,
        max_context=64,
        page_size=4,
        num_pages=16,
        has_sequence_state=True,
        num_snapshots=4,
    )
    scheduler = Scheduler(limits, policy=SchedulerConfig(cache_replies=True))
    first = RequestState(0, (1,) * 6, SamplingParams(max_tokens=30))
    scheduler.add(first)
    plan = scheduler.schedule()
    while len(first.output) < 5:
        before, plan = plan, scheduler.schedule()
        assert before is not None and plan is not None
        for running in before.rows.values():
            scheduler.take(running, 7, is_end=False)
    (running,) = scheduler.running
    scheduler.schedule()
    assert running.num_computed == len(first.prompt) + len(first.output) + 1 == 12
    scheduler.cancel(first)
    assert not scheduler.cache_manager.snapshots._num_borrowed
    second = RequestState(1, (*first.prompt, *first.output, 7, 5), SamplingParams(max_tokens=3))
    scheduler.add(second)
    scheduler.schedule()
    assert second.num_cached == 8


def test_one_that_made_room_and_comes_back_decodes_on_its_new_slot() -> None:
    """The same rows decode as before, on another slot."""
    limits = Capabilities(
        max_num_seqs=2, max_context=64, cell=4, page_size=4, num_pages=6, max_prompts=2
    )
    policy = SchedulerConfig(step_ms=1e-9, reuses=False, host_bytes=1000)
    scheduler = Scheduler(limits, policy=policy, state_bytes=lambda positions, _: positions)
    first, decoding, last = (
        RequestState(n, (1,) * length, SamplingParams(max_tokens=most), priority)
        for n, length, most, priority in ((0, 1, 1, 0), (1, 3, 8, 1), (2, 16, 1, 0))
    )
    plan, steps = None, []
    for request in (first, decoding):
        scheduler.add(request)
    while True:
        before, plan = plan, scheduler.schedule()
        for running in before.rows.values() if before is not None else ():
            scheduler.take(running, 7, is_end=False)
        if plan is None:
            break
        steps.append((plan.step.decode, [chunk.slot for chunk in plan.step.prompts]))
        if first.finish_reason is not None and last.order == 0:
            scheduler.add(last)
    assert steps[-1] == ((1,), [0]), "the last piece of a prompt that holds all other pages"
    assert last.finish_reason is not None and scheduler.num_swapped == 1
    plan = scheduler.schedule()
    assert plan is not None and plan.step.decode == (0,) and list(plan.rows) == [0]


def test_a_short_prompt_passes_a_long_one_that_gets_every_second_piece() -> None:
    limits = Capabilities(max_num_seqs=4, max_context=64, cell=4)
    loop = Scheduler(limits, policy=SchedulerConfig(step_ms=1e-9))
    dealer: PrefillScheduler = loop._prefill
    long, short = (asked(number, length) for number, length in ((0, 40), (1, 12)))
    for request in (long, short):
        request.take_slot(Slot(request.request_id), num_cached=0, max_num_computed=0)
    order = []
    for _ in range(6):
        ((running, count),) = dealer.deal([r for r in (long, short) if r.prompt_left], 1)
        running.prompt_left -= count
        order.append(running.request_id)
    assert order == [0, 1, 0, 1, 0, 1]
