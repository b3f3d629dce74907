"""Engine loop on queues: output equals `LLM`, and failed steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.runtime.queued import VOCAB, QueuedExecutable
from tests.runtime.test_scheduler import answer
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.loop import LostDeviceError
from tilewright.runtime.messages import (
    AbortRequest,
    FromEngine,
    Heartbeat,
    NewTokens,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
)
from tilewright.runtime.request import EngineRequest
from tilewright.runtime.scheduling.engine_stats import bounds_of
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.service import EngineService, QueueTransport


def submit(number: int, wanted: int = 6) -> EngineRequest:
    prompt = tuple((5 * number + at) % VOCAB for at in range(3))
    return EngineRequest(number, prompt, SamplingParams(seed=number, max_tokens=wanted))


def serve(
    executable: Any, *messages: ToEngine, turns: int = 60, reuses: bool = False
) -> list[FromEngine]:
    """Return all messages for concurrent requests, encoded and decoded."""
    transport = QueueTransport()
    loop = EngineService(executable, transport, policy=SchedulerConfig(reuses=reuses))
    frame = msgspec.msgpack.encode(messages)
    transport.inbox.extend(msgspec.msgpack.decode(frame, type=list[ToEngine]))
    for _ in range(turns):
        assert loop.turn()
    said = msgspec.msgpack.encode(list(transport.outbox))
    return msgspec.msgpack.decode(said, type=list[FromEngine])


def tokens_of(said: list[FromEngine], number: int) -> list[int]:
    return [
        token
        for message in said
        if isinstance(message, NewTokens) and message.request_id == number
        for token in message.tokens
    ]


@pytest.mark.parametrize("page_size", [0, 4])
def test_each_request_is_told_as_if_it_were_alone(page_size: int) -> None:
    asked = [submit(number) for number in range(7)]
    pages = {"page_size": page_size, "num_pages": 32} if page_size else {}
    said = serve(QueuedExecutable(**pages), *asked)
    for each in asked:
        assert tokens_of(said, each.request_id) == answer(
            RequestState(0, each.prompt, each.sampling)
        )
        own = [m for m in said if not isinstance(m, Heartbeat) and m.request_id == each.request_id]
        assert isinstance(own[0], RequestStarted) and isinstance(own[-1], RequestFinished)
        assert own[-1].reason == "length" and own[0].queue_s >= 0 <= own[-1].decode_s
    beats = [message for message in said if isinstance(message, Heartbeat)]
    assert (beats[-1].num_running, beats[-1].num_waiting) == (0, 0)


def test_a_cancelled_request_is_not_spoken_of_again() -> None:
    executable = QueuedExecutable()
    said = serve(executable, submit(1, 40), submit(2), AbortRequest(1), AbortRequest(99))
    assert not tokens_of(said, 1) and len(tokens_of(said, 2)) == 6
    assert executable.num_open == 0


class _Failing(QueuedExecutable):
    """Fails in several compute steps, from the third on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.seen = count, 0

    def step(self, step: Any) -> Any:
        self.seen += bool(step.decode or step.prompts)
        if self.seen > 2 and self.count and (step.decode or step.prompts):
            self.count -= 1
            raise RuntimeError("out of memory")
        return super().step(step)


@pytest.mark.parametrize(("count", "failed"), [(1, {3}), (2, {1, 2, 3})])
def test_a_step_that_raises_costs_the_newest_and_then_all(count: int, failed: set[int]) -> None:
    asked = [submit(number) for number in (1, 2, 3)]
    said = serve(_Failing(count), *asked)
    found = [message for message in said if isinstance(message, RequestFailed)]
    assert {message.request_id for message in found} == failed
    assert all(m.code == "engine_error" and "out of memory" in m.message for m in found)
    for each in asked:
        if each.request_id not in failed:
            whole = answer(RequestState(0, each.prompt, each.sampling))
            assert tokens_of(said, each.request_id) == whole


class _FailingAt(QueuedExecutable):
    """Fails in the compute step with a given index."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def step(self, step: Any) -> Any:
        self.left -= bool(step.decode or step.prompts)
        if self.left == -1 and (step.decode or step.prompts):
            raise RuntimeError("out of memory")
        return super().step(step)


@pytest.mark.parametrize("others", [(), (submit(3, 20),)])
@pytest.mark.parametrize("at", range(2, 6))
def test_what_was_on_its_way_when_a_step_failed_is_said(
    at: int, others: tuple[EngineRequest]
) -> None:
    """In any step with the second prompt, also after all requests."""
    transport = QueueTransport()
    service = EngineService(_FailingAt(at), transport, policy=SchedulerConfig(reuses=False))
    first = submit(1, 4)
    transport.inbox.extend((first, *others))
    for turn in range(60):
        if turn == at - 1:
            transport.inbox.append(submit(2))
        service.turn()
    said = list(transport.outbox)
    assert [m.request_id for m in said if isinstance(m, RequestFailed)] == [2]
    assert not tokens_of(said, 2)
    for each in (first, *others):
        whole = answer(RequestState(0, each.prompt, each.sampling))
        assert tokens_of(said, each.request_id) == whole
        own = [m for m in said if not isinstance(m, Heartbeat) and m.request_id == each.request_id]
        assert isinstance(own[-1], RequestFinished)


def test_who_waits_is_not_blamed_for_a_step_that_raises() -> None:
    asked = [submit(number) for number in (1, 2)]
    transport = QueueTransport()
    executable = _Failing(1)
    executable.capabilities = replace(executable.capabilities, max_num_seqs=1)
    service = EngineService(executable, transport)
    transport.inbox.extend(asked)
    for _ in range(60):
        assert service.turn()
    failed = [each.request_id for each in transport.outbox if isinstance(each, RequestFailed)]
    assert failed == [1]
    assert tokens_of(list(transport.outbox), 2) == answer(
        RequestState(0, (10, 11, 12), asked[1].sampling)
    )


class _Lost(QueuedExecutable):
    """Fails like a driver with a lost context, at a launch or at a read."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read

    def step(self, step: Any) -> Any:
        super().step(step)
        if not self.is_read:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return SimpleNamespace(parts=[self])

    def read(self) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("is_read", [True, False])
def test_a_lost_device_ends_the_engine(is_read: bool) -> None:
    transport = QueueTransport()
    service = EngineService(_Lost(is_read=is_read), transport)
    transport.inbox.append(submit(1))
    with pytest.raises(LostDeviceError if is_read else RuntimeError, match="CUDA error"):
        service.run()


@pytest.mark.parametrize(
    ("limits", "expected"), [({}, 256), ({"page_size": 4, "num_pages": 32}, 128)]
)
def test_the_bytes_of_all_state_are_told_before_anybody_sits(
    limits: dict[str, int], expected: int
) -> None:
    """For the whole pool, or for four slots at full length with their state."""
    executable: Any = QueuedExecutable(**limits)
    executable.state_bytes = lambda positions, sequences: 1000 * positions + sequences
    ready = EngineService(executable, QueueTransport()).ready({})
    assert ready.cache_bytes == 1000 * expected + 4


def test_forgotten_prefixes_are_not_found_again() -> None:
    transport = QueueTransport()
    service = EngineService(QueuedExecutable(page_size=4, num_pages=32), transport)

    def cached(number: int, *before: ToEngine, salt: str = "") -> int:
        prompt = tuple(range(9))
        asked = EngineRequest(number, prompt, SamplingParams(max_tokens=2), cache_salt=salt)
        transport.inbox.extend((*before, asked))
        for _ in range(10):
            service.turn()
        own = [
            m for m in transport.outbox if isinstance(m, RequestStarted) and m.request_id == number
        ]
        return own[0].num_cached

    assert cached(8, salt="1 x") == 0
    assert [cached(1), cached(2), cached(3, ResetPrefixCache()), cached(4)] == [0, 8, 0, 8]
    assert [cached(5, salt="a"), cached(6, salt="a"), cached(7, salt="b")] == [0, 8, 0]
    assert cached(9, salt="x") == 0, "1 x, as it was said before, is not x of era 1"


def test_beats_count_steps_by_kind_and_by_time() -> None:
    said = serve(QueuedExecutable(), submit(1), submit(2))
    last = [message for message in said if isinstance(message, Heartbeat)][-1]
    kinds = {name.partition("/")[0] for name in last.stats}
    assert {"step_seconds", "host_seconds", "iteration_tokens"} <= kinds
    sizes = last.stats["iteration_tokens"]
    assert sum(sizes.counts) == last.num_steps and sizes.total == 2 * 3 + 2 * 5
    for name, tally in last.stats.items():
        assert len(tally.counts) == len(bounds_of(name)) + 1 and tally.total >= 0


def test_a_long_prompt_alone_is_cut_so_that_the_engine_is_heard_of() -> None:
    """If steps block: some cells without measurements, then about a second."""
    executable = QueuedExecutable(runs_ahead=False, max_context=4096)
    transport = QueueTransport()
    service = EngineService(executable, transport, policy=SchedulerConfig(reuses=False, step_ms=0))
    prompt = EngineRequest(1, (1,) * 3000, SamplingParams(max_tokens=1))
    transport.inbox.append(prompt)
    service.turn()
    service.loop.cost.forget()
    service.loop.cost.measure(0, 4, 20.0)  # 5 ms per token
    service.turn()
    first, second = (len(step.prompts[0].tokens) for step in executable.given)
    assert (first, second) == (16, 200)
    ahead = QueuedExecutable(max_context=4096)
    serve(ahead, prompt, turns=1)
    assert len(ahead.given[0].prompts[0].tokens) == 3000, "beats go on meanwhile"


def test_stop_leaves_the_loop() -> None:
    transport = QueueTransport()
    loop = EngineService(QueuedExecutable(), transport)
    transport.inbox.append(Shutdown())
    assert not loop.turn()


def test_the_choices_of_a_prompt_compute_it_once_and_say_so() -> None:
    executable = QueuedExecutable(page_size=4, num_pages=64, max_num_seqs=3)
    prompt = tuple(range(9))
    asked = [
        EngineRequest(n, prompt, SamplingParams(seed=n, max_tokens=4), like=1 if n > 1 else None)
        for n in (1, 2, 3, 4)
    ]
    said = serve(executable, *asked, reuses=True)
    for each in asked:
        alone = answer(RequestState(0, each.prompt, each.sampling))
        assert tokens_of(said, each.request_id) == alone
    started = {m.request_id: m.num_cached for m in said if isinstance(m, RequestStarted)}
    assert started == {1: 0, 2: 9, 3: 9, 4: 8}, "the fourth has no slot, and finds its pages"
    computed = [chunk.tokens for step in executable.given for chunk in step.prompts]
    assert sum(map(len, computed)) == 9 + 1


def test_many_preemptions_are_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [submit(number, 30) for number in range(1, 5)]
    serve(QueuedExecutable(page_size=4, num_pages=12), *asked, turns=200)
    (line,) = capsys.readouterr().err.splitlines()
    assert "requests have been preempted for want of pages; fewer --max-num-seqs" in line
