"""Random requests and capabilities: all requests finish, in order and with fairness.

The queued device checks pages, positions and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.queued import VOCAB, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import AssignPages, Step, StepOutput
from tilewright.errors import RequestError
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED, LENGTH, STOPPED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Job:
    """Shared and own prompt tokens, output tokens, and the arrival step."""

    shared: int
    own: int
    wanted: int
    arrival: int
    priority: int

    def request(self, number: int) -> RequestState:
        prompt = [at % VOCAB for at in range(self.shared)]
        prompt += [(7 * number + at) % VOCAB for at in range(self.own)]
        sampling = SamplingParams(seed=number, max_tokens=self.wanted)
        return RequestState(number, tuple(prompt), sampling, priority=self.priority)


JOBS = st.lists(
    st.builds(
        Job,
        shared=st.integers(0, 20),
        own=st.integers(1, 20),
        wanted=st.integers(1, 10),
        arrival=st.integers(0, 25),
        priority=st.sampled_from((0, 0, 0, 1)),
    ),
    min_size=1,
    max_size=9,
)


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_context": CONTEXT,
        "runs_ahead": draw(st.booleans()),
        "max_prompts": draw(st.integers(1, 3)),
        "max_step_tokens": draw(st.integers(8, 48)),
        "passes": draw(st.sampled_from(((), ((2, (4, 12)), (9, (4, 8)))))),
        "far": draw(st.sampled_from((0, 5, 40))),
    }
    if draw(st.booleans()):
        found |= {"page_size": 4, "num_pages": draw(st.integers(16, 48))}
    if draw(st.booleans()):
        found |= {"has_sequence_state": True, "num_snapshots": draw(st.integers(0, 6))}
    return found


def run(
    jobs: list[Job], executable: QueuedExecutable, *, policy: SchedulerConfig | None = None
) -> tuple[EngineLoop, list[RequestState], list[list[int]]]:
    """Run the jobs. Return the output, and the requests with a token by step."""
    made = [job.request(number) for number, job in enumerate(jobs)]
    llm, tokens = EngineLoop(executable, policy=policy), []
    coming = sorted(range(len(jobs)), key=lambda n: (jobs[n].arrival, n))
    while coming or llm.has_work():
        while coming and (jobs[coming[0]].arrival <= len(tokens) or not llm.has_work()):
            llm.add(made[coming.pop(0)])
        tokens.append([request.request_id for request in llm.step()])
        assert len(tokens) < 10_000, "no end"
    assert executable.num_open == llm.scheduler.num_kept, "all slots are given back, or kept"
    assert llm.scheduler.num_used_pages == 0, "and all pages"
    return llm, made, tokens


def answer(made: RequestState) -> list[int]:
    """Return a request's output without concurrent requests."""
    alone = RequestState(0, made.prompt, made.sampling)
    EngineLoop(QueuedExecutable(runs_ahead=False)).generate([alone])
    return alone.output


@given(JOBS, limits(), st.sampled_from((0.0, 1e-9, 20.0)), st.sampled_from((0, 30, 1000)))
def test_every_request_is_answered_as_if_it_were_alone(
    jobs: list[Job], limits: dict[str, Any], step_ms: float, host_bytes: int
) -> None:
    policy = SchedulerConfig(step_ms=step_ms, host_bytes=host_bytes, cache_replies=host_bytes > 30)
    _, made, _ = run(jobs, QueuedExecutable(**limits), policy=policy)
    for request in made:
        assert (request.output, request.finish_reason) == (answer(request), LENGTH)
        assert len(request.token_times) == len(request.output)


@given(JOBS, limits())
def test_chunks_cover_what_is_not_cached_once_and_in_order(
    jobs: list[Job], limits: dict[str, Any]
) -> None:
    executable = QueuedExecutable(**limits)
    llm, made, _ = run(jobs, executable, policy=SchedulerConfig(reuses=False, host_bytes=0))
    computed = sum(len(chunk.tokens) for step in executable.given for chunk in step.prompts)
    prompts = sum(len(request.prompt) for request in made)
    assert computed == prompts if not llm.scheduler.num_preemptions else computed > prompts
    choosing = sum(chunk.chooses for step in executable.given for chunk in step.prompts)
    assert choosing <= len(made)


@given(JOBS, limits())
def test_what_was_computed_for_others_is_not_computed_again(
    jobs: list[Job], limits: dict[str, Any]
) -> None:
    _, made, _ = run(jobs, QueuedExecutable(**limits))
    for request in made:
        assert request.num_cached % max(limits.get("page_size", 0), 1) == 0
        assert request.num_cached < len(request.prompt), "the last token is always computed"


def test_a_second_prompt_of_the_same_beginning_computes_its_own_end_alone() -> None:
    executable = QueuedExecutable(page_size=4, num_pages=64)
    llm = EngineLoop(executable)
    first, second = Job(20, 3, 2, 0, 0).request(0), Job(20, 3, 2, 0, 0).request(1)
    llm.generate([first])
    llm.generate([second])
    assert (first.num_cached, second.num_cached) == (0, 20)
    *_, chunk = (chunk for step in executable.given for chunk in step.prompts)
    assert chunk.start == 20 and second.output == answer(second)


def test_a_private_prompt_neither_finds_nor_leaves_pages() -> None:
    llm = EngineLoop(QueuedExecutable(page_size=4, num_pages=64))
    made = [Job(20, 3, 2, 0, 0).request(number) for number in range(3)]
    made[0].is_private = made[2].is_private = True
    for request in made:
        llm.generate([request])
    assert [request.num_cached for request in made] == [0, 0, 0]
    again = Job(20, 3, 2, 0, 0).request(3)
    llm.generate([again])
    assert again.num_cached == 20, "from the one that was shared"


@pytest.mark.parametrize(("step_tokens", "pieces"), [(None, [6, 8, 10]), (3, [3, 3, 3, 3])])
def test_without_pages_pieces_are_whole_cells(step_tokens: int | None, pieces: list[int]) -> None:
    """Without pages, chunks are whole cells except the last, or whole steps."""
    executable = QueuedExecutable(cell=4, max_prompts=3, max_step_tokens=16)
    llm = EngineLoop(executable, policy=SchedulerConfig(step_tokens=step_tokens))
    llm.generate([Job(0, 6, 1, 0, 0).request(0), Job(0, 18, 1, 0, 0).request(1)])
    found = [len(chunk.tokens) for step in executable.given for chunk in step.prompts]
    assert found[: len(pieces)] == pieces and sum(found) == 24


def test_streams_go_on_while_a_long_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token follows each chunk. The device clock is exact, regardless of the host."""
    executable = QueuedExecutable(cell=4)
    monkeypatch.setattr(loop_module.time, "perf_counter", executable.clock)
    llm = EngineLoop(executable, policy=SchedulerConfig(step_ms=1e-9))
    stream, long = Job(0, 2, 40, 0, 0).request(0), Job(0, 20, 1, 0, 0).request(1)
    llm.add(stream)
    for _ in range(3):
        llm.step()
    llm.add(long)
    before = len(stream.output)
    while not long.output:
        llm.step()
    pieces = [len(c.tokens) for step in executable.given for c in step.prompts if c.slot]
    assert pieces == [4] * 5 and len(stream.output) - before >= 5
    llm.cancel(stream)


@pytest.mark.parametrize("host_bytes", [0, 20, 1000])
def test_without_pages_left_the_newest_waits_and_goes_on_where_it_was(host_bytes: int) -> None:
    """Its state returns from host memory, or is recomputed."""
    executable = QueuedExecutable(page_size=4, num_pages=12)
    llm = EngineLoop(executable, policy=SchedulerConfig(host_bytes=host_bytes))
    made = [Job(0, 8, 30, 0, 0).request(number) for number in range(3)]
    most = 0
    for request in made:
        llm.add(request)
    while llm.has_work():
        llm.step()
        most = max(most, llm.scheduler.num_swapped)
        assert executable.num_places == llm.scheduler.num_swapped <= host_bytes // 8
    assert llm.scheduler.num_preempted and not made[0].num_preemptions
    assert [request.output for request in made] == [answer(request) for request in made]
    assert bool(most) == (host_bytes > 0)
    is_replayed = any(step.forced for step in executable.given)
    assert is_replayed == (host_bytes < 1000), "known tokens are replayed one by one"


def test_one_that_is_cancelled_while_its_state_is_away_leaves_none_there() -> None:
    executable = QueuedExecutable(page_size=4, num_pages=12)
    llm = EngineLoop(executable)
    made = [Job(0, 8, 30, 0, 0).request(number) for number in range(3)]
    for request in made:
        llm.add(request)
    while not llm.scheduler.num_swapped:
        llm.step()
    llm.cancel(next(each for each in made if each.num_preemptions))
    llm.generate([])
    assert executable.num_places == llm.scheduler.num_swapped == 0
    assert sum(request.finish_reason == LENGTH for request in made) == 2


@given(JOBS, limits())
def test_no_stream_waits_for_prompts(jobs: list[Job], limits: dict[str, Any]) -> None:
    """Every step has a token for each decoding request, unless it was preempted."""
    _, made, tokens = run(jobs, QueuedExecutable(**limits))
    for request in made:
        got = [at for at, ids in enumerate(tokens) if request.request_id in ids]
        if not request.num_preemptions:
            assert all(later - earlier == 1 for earlier, later in pairwise(got))


@given(JOBS, limits(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=5))
def test_cancelled_requests_stop_and_the_others_do_not(
    jobs: list[Job], limits: dict[str, Any], cancels: list[tuple[int, int]]
) -> None:
    executable = QueuedExecutable(**limits)
    llm = EngineLoop(executable)
    made = [job.request(number) for number, job in enumerate(jobs)]
    for request in made:
        llm.add(request)
    at = 0
    while llm.has_work():
        for step, number in cancels:
            if step == at and number < len(made):
                done = made[number].finish_reason
                llm.cancel(made[number])
                assert made[number].finish_reason == (done or CANCELLED)
        llm.step()
        at += 1
    for request in made:
        assert request.output == answer(request)[: len(request.output)]
        whole = len(request.output) == request.sampling.max_tokens
        assert request.finish_reason == (LENGTH if whole else CANCELLED)
    assert executable.num_open == llm.scheduler.num_kept
    assert llm.scheduler.num_used_pages == 0


def one(**limits: Any) -> EngineLoop:
    return EngineLoop(QueuedExecutable(**{"max_num_seqs": 2, "runs_ahead": False, **limits}))


def test_an_end_token_ends_a_request_and_is_its_last() -> None:
    wanted = answer(RequestState(0, (1, 2, 3), SamplingParams(max_tokens=9)))
    request = RequestState(
        0, (1, 2, 3), SamplingParams(max_tokens=9, stop_token_ids=(99, wanted[4]))
    )
    one().generate([request])
    assert request.output == wanted[: wanted.index(wanted[4]) + 1]
    assert request.finish_reason == STOPPED


@pytest.mark.parametrize(
    ("prompt", "wanted", "message"),
    [
        ((), 1, "the prompt is empty; allowed: at least one token"),
        ((1,) * 65, 1, "a prompt of 65 tokens and 1 to generate .*; allowed: 65 together"),
        ((1,) * 60, 6, "a prompt of 60 tokens and 6 to generate .*; allowed: 65 together"),
        ((1, VOCAB), 1, f"token {VOCAB}; allowed: 0 to {VOCAB - 1}"),
        ((-1,), 1, f"token -1; allowed: 0 to {VOCAB - 1}"),
    ],
)
def test_what_can_never_be_served_is_refused_and_the_rest_goes_on(
    prompt: tuple[int, ...], wanted: int, message: str
) -> None:
    llm = one()
    good = RequestState(0, (1,) * 60, SamplingParams(max_tokens=5))
    llm.add(good)
    with pytest.raises(RequestError, match=message) as caught:
        llm.add(RequestState(1, prompt, SamplingParams(max_tokens=wanted)))
    assert "\n" not in str(caught.value)
    llm.generate([])
    assert len(good.output) == 5


def test_what_the_pool_can_never_hold_is_refused() -> None:
    llm = one(page_size=4, num_pages=4)
    with pytest.raises(RequestError, match="allowed: 17 together"):
        llm.add(RequestState(0, (1,) * 10, SamplingParams(max_tokens=8)))


def batch_of(*lengths: int) -> list[RequestState]:
    return [
        RequestState(n, (1,) * length, SamplingParams(max_tokens=5))
        for n, length in enumerate(lengths)
    ]


def test_generate_queues_all_or_nothing() -> None:
    llm, heard = one(), list[int]()
    with pytest.raises(RequestError, match=r"a prompt of 65 tokens and 5 to generate"):
        llm.generate(batch_of(3, 4, 65))
    assert not llm.has_work()
    llm.generate(
        [RequestState(9, (1,), SamplingParams(max_tokens=2))],
        lambda r, t: heard.append(r.request_id),
    )
    assert heard == [9, 9]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_callback_that_raises_leaves_nothing_behind(runs_ahead: bool) -> None:
    executable = QueuedExecutable(runs_ahead=runs_ahead, max_num_seqs=2)
    llm = EngineLoop(executable)
    requests = batch_of(3, 4, 5)

    def on_token(request: RequestState, token: int) -> None:
        if len(request.output) == 2:
            raise KeyError("a bug of the listener")

    with pytest.raises(KeyError):
        llm.generate(requests, on_token)
    assert not llm.has_work() and executable.num_open == llm.scheduler.num_kept
    assert {request.finish_reason for request in requests} == {CANCELLED}
    (again,) = batch_of(3)
    llm.generate([again])
    assert again.output == answer(again)


@dataclass
class Broken:
    """Fails in the third step."""

    step: Callable[[Step], StepOutput]
    num_steps: int = 0

    def __call__(self, step: Step) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("step 3")
        return self.step(step)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_executable_that_raises_leaves_nothing_behind(runs_ahead: bool) -> None:
    llm = one(page_size=4, num_pages=32, runs_ahead=runs_ahead)
    llm.executable.step = Broken(llm.executable.step)
    others = batch_of(6)
    llm.add(others[0])
    with pytest.raises(RuntimeError, match="step 3"):
        llm.generate(batch_of(3, 4, 5))
    assert llm.scheduler.num_used_pages == 0
    llm.generate([])
    assert others[0].output == answer(others[0]), "who asked before is served all the same"
    assert llm.executable.num_open == llm.scheduler.num_kept


def test_who_cannot_be_given_a_slot_still_waits_at_their_place() -> None:
    """The failed request stays first in the queue."""
    llm = one(max_num_seqs=1)
    llm.executable.step = Broken(llm.executable.step, num_steps=2)
    first, second = batch_of(3, 4)
    llm.add(first)
    llm.add(second)
    with pytest.raises(RuntimeError, match="step 3"):
        llm.step()
    assert list(llm.scheduler.line) == [first, second] and not llm.scheduler.running
    llm.generate([])
    assert (first.output, second.output) == (answer(first), answer(second))


def test_an_idle_step_is_no_error() -> None:
    llm = one()
    assert llm.step() == []
    llm.generate(batch_of(3))
    assert llm.step() == []


def test_prefix_of_a_large_step_is_shared_only_while_many_requests_run() -> None:
    limits: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_context": 64}
    executable = QueuedExecutable(**limits, invariant="rows", invariant_rows=2)
    llm = EngineLoop(executable)
    shared = tuple(range(1, 17))

    def run(count: int) -> list[int]:
        """Return the cached tokens of a request for the shared prompt."""
        others = [
            RequestState(n, (17 + n,) * 5, SamplingParams(max_tokens=6)) for n in range(1, count)
        ]
        request = RequestState(0, shared, SamplingParams(max_tokens=3))
        llm.generate([request, *others])
        return [request.num_cached]

    assert run(3) == [0] and run(3) == [12], "among three, pages of three"
    assert run(1) == [0] and run(1) == [12] and run(3) == [12], "computed again without others"


@pytest.mark.parametrize("num_pages, sizes", [(12, [3, 3]), (9, [3, 1, 1, 1])])
def test_sequences_near_a_page_end_get_pages_together(num_pages: int, sizes: list[int]) -> None:
    """Without a spare page for every sequence, a sequence gets a page at its page end only."""
    limits: dict[str, Any] = {"page_size": 16, "max_num_seqs": 3, "max_context": 48}
    executable = QueuedExecutable(**limits, num_pages=num_pages, max_prompts=3)
    llm, counts = EngineLoop(executable), list[int]()
    run = executable.step

    def step(step: Step) -> StepOutput:
        if not step.prompts:
            counts.append(sum(isinstance(edit, AssignPages) for edit in step.edits))
        return run(step)

    executable.step = step  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=30)
    llm.generate([RequestState(n, (n,) * (5 + n), sampling) for n in range(3)])
    assert [count for count in counts if count] == sizes
