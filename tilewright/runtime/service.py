"""The engine service: receives messages, runs steps, sends messages. One thread, no texts."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections import deque
from dataclasses import replace

from tilewright.compiler.targets.interface.base import Executable
from tilewright.errors import RankError, RequestError, one_line
from tilewright.runtime.grammar.matchers import Grammars
from tilewright.runtime.loop import EngineLoop, LostDeviceError
from tilewright.runtime.messages import (
    AbortRequest,
    EngineReady,
    FromEngine,
    Heartbeat,
    NewTokens,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
    Transport,
)
from tilewright.runtime.request import CANCELLED, FAILED, EngineRequest
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.draft_model import DraftModel

BEAT_SECONDS = 1.0


class EngineService:
    """Serves a transport's requests with an :class:`EngineLoop`.

    A failed launch fails the step's newest prompt, and the step runs again. A second failure
    fails all requests of the step. A lost device ends the engine, and its parent starts another.
    """

    def __init__(
        self,
        executable: Executable,
        transport: Transport,
        *,
        policy: SchedulerConfig | None = None,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        policy = replace(policy or SchedulerConfig(), beat_ms=1e3 * BEAT_SECONDS)
        self.loop = EngineLoop(
            executable, policy=policy, grammars=grammars, draft_model=draft_model
        )
        self._transport = transport
        self._live: dict[int, RequestState] = {}
        self._num_steps = 0
        self._num_failures = 0
        self._blamed: tuple[RequestState, ...] = ()
        self._era = 0
        self._next_beat = 0.0
        self._is_stopped = self._has_warned = False

    def ready(self, facts: dict[str, str]) -> EngineReady:
        """Return the engine's properties for its clients."""
        executable = self.loop.executable
        limits = executable.capabilities
        pool = limits.num_pages * limits.page_size or limits.max_num_seqs * limits.max_context
        return EngineReady(
            vocab_size=executable.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            max_context=limits.max_context,
            max_positions=min(limits.max_context, pool),
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            num_snapshots=limits.num_snapshots,
            cell=limits.cell,
            invariant=limits.invariant,
            invariant_rows=limits.invariant_rows,
            cache_bytes=executable.state_bytes(pool, limits.max_num_seqs),
            hidden_size=limits.hidden_size,
            speculation=self.loop.scheduler.speculator.facts(),
            images=None if executable.encoder is None else executable.encoder.settings.processor,
            shares_prefixes=self.loop.scheduler.policy.reuses,
            facts=facts,
        )

    def run(self) -> None:
        """Serve requests until a :class:`Shutdown`."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Receive messages, run a step, send its results. Return False after a :class:`Shutdown`.

        Without work, wait for a message until the next heartbeat.
        """
        now = time.perf_counter()
        patience = 0.0 if self.loop.has_work() else max(0.0, self._next_beat - now)
        said: list[FromEngine] = []
        for message in self._transport.receive(patience):
            self._receive(message, said)
        if self.loop.has_work():
            self._step(said)
            if not self.loop.has_work():
                self._next_beat = 0.0  # report the empty state at once
        if (now := time.perf_counter()) >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self.loop.executable.check()  # a rank may end without a request
            said.append(self._beat())
        if said:
            self._transport.send(said)
        return not self._is_stopped

    def _receive(self, message: ToEngine, said: list[FromEngine]) -> None:
        if isinstance(message, EngineRequest):
            like = self._live.get(message.like) if message.like is not None else None
            state = RequestState.of(message, cache_salt=self._salt(message.cache_salt), like=like)
            try:
                self.loop.add(state)
            except RequestError as error:  # the API server should have refused it
                said.append(RequestFailed(message.request_id, "engine_error", str(error)))
                return
            self._live[message.request_id] = state
        elif isinstance(message, AbortRequest):
            canceled = self._live.pop(message.request_id, None)
            if canceled is not None:
                self.loop.cancel(canceled)
        elif isinstance(message, ResetPrefixCache):
            self._era += 1
        else:
            assert isinstance(message, Shutdown), message
            self._is_stopped = True

    def _salt(self, salt: str) -> str:
        """Return a cache salt that changes when the prefix cache is reset."""
        return f"{self._era} {salt}"

    def _step(self, said: list[FromEngine]) -> None:
        began = time.perf_counter()
        try:
            served = self.loop.step()
        except Exception as error:
            self._take_failure(error, said)
            return
        self._num_steps += 1
        self._num_failures, self._blamed = 0, ()
        self._say_started(began, said)
        for request in served:
            self._say_tokens(request, said)
        self._say_ends(said)
        self._warn_of_preemptions()

    def _warn_of_preemptions(self) -> None:
        """Warn once if more than 1 % of the requests were preempted."""
        scheduler = self.loop.scheduler
        if self._has_warned or 100 * scheduler.num_preempted <= scheduler.num_arrived:
            return
        self._has_warned = True
        print(
            f"tilewright: {scheduler.num_preempted} of {scheduler.num_arrived} requests have been "
            "preempted for want of pages; fewer --max-num-seqs, or a larger "
            "--gpu-memory-utilization, avoids it",
            file=sys.stderr,
        )

    def _say_started(self, began: float, said: list[FromEngine]) -> None:
        for request in self.loop.scheduler.running:
            if request.started_at is None:
                self._say_running(request, began, said)

    def _say_running(self, request: RequestState, began: float, said: list[FromEngine]) -> None:
        if request.request_id in self._live and request.started_at is None:
            request.started_at = max(began, request.arrived_at)
            waited = request.started_at - request.arrived_at
            said.append(RequestStarted(request.request_id, waited, request.num_cached))

    def _say_tokens(self, request: RequestState, said: list[FromEngine]) -> None:
        if request.started_at is None:  # started and finished within this step
            self._say_running(request, request.token_times[0], said)
        num_sent, request.num_sent = request.num_sent, len(request.output)
        fresh = tuple(request.output[num_sent:])
        if fresh:
            echo = () if num_sent else tuple(request.prompt_logprobs)
            logprobs = tuple(request.logprobs[num_sent:])
            drafts = request.num_draft_tokens, request.num_accepted_tokens
            said.append(NewTokens(request.request_id, fresh, logprobs, echo, *drafts))

    def _say_ends(self, said: list[FromEngine]) -> None:
        ended = [state for state in self._live.values() if state.finish_reason is not None]
        for request in ended:
            self._say_end(request, said)

    def _say_end(self, request: RequestState, said: list[FromEngine]) -> None:
        if request.started_at is None and request.pooling is not None and request.token_times:
            self._say_running(request, request.token_times[0], said)
        if request.num_sent < len(request.output):  # tokens of a failed step
            self._say_tokens(request, said)
        del self._live[request.request_id]
        if request.finish_reason == FAILED:
            said.append(RequestFailed(request.request_id, request.error_code, request.error))
            return
        # A grammar may be complete without a token.
        times = request.token_times or [time.perf_counter()]
        first, last = times[0], times[-1]
        started = request.started_at if request.started_at is not None else first
        assert request.finish_reason is not None
        said.append(
            RequestFinished(
                request.request_id,
                request.finish_reason,
                first - started,
                last - first,
                request.num_preemptions,
                vector_of(request),
            )
        )

    def _take_failure(self, error: Exception, said: list[FromEngine]) -> None:
        """Fail the step's newest prompt, at the second failure all its requests.

        Raises:
            Exception: ``error``, if the device is lost or the step is unknown.
        """
        if _is_lost(error) or not self.loop.failed:
            raise error
        self._num_failures += 1
        hit = tuple(dict.fromkeys((*self.loop.failed, *self._blamed)))
        self.loop.failed = ()
        if self._num_failures == 1:
            hit, self._blamed = hit[:1], hit[1:]
            with contextlib.suppress(OSError):  # full disk
                traceback.print_exception(error, file=sys.stderr)
        else:
            self._num_failures, self._blamed = 0, ()
        for request in hit:
            self.loop.cancel(request)  # the last one reads a step in flight
        for request in hit:
            if self._live.get(request.request_id) and request.finish_reason == CANCELLED:
                del self._live[request.request_id]
                reason = f"the step failed: {one_line(error)}"
                said.append(RequestFailed(request.request_id, "engine_error", reason))
        self._say_ends(said)

    def _beat(self) -> Heartbeat:
        scheduler = self.loop.scheduler
        speculator = scheduler.speculator
        return Heartbeat(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.line),
            num_used_pages=scheduler.num_used_pages,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_dropped=self.loop.num_dropped,
            num_swapped=scheduler.num_swapped,
            num_snapshots_used=scheduler.num_snapshots_used,
            num_images=scheduler.images.num_images,
            num_image_hits=scheduler.images.num_hits,
            stats=self.loop.stats.found,
            speculation=speculator.counts if speculator.has_counts else None,
        )


def vector_of(request: RequestState) -> bytes:
    """Return a request's pooled vector as little-endian float32. Empty: it has none."""
    pooling = request.pooling
    if pooling is None or pooling.vector is None:
        return b""
    return pooling.vector.astype("<f4").tobytes()


def _is_lost(error: Exception) -> bool:
    """Return whether a rank or the device is gone. Too little memory leaves the device whole."""
    if isinstance(error, LostDeviceError | RankError):
        return True
    text = str(error)
    return "CUDA" in text and "error" in text.lower() and "out of memory" not in text.lower()


class QueueTransport:
    """Two queues in a process. Engine and client take turns."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.outbox: deque[FromEngine] = deque()

    def receive(self, seconds: float) -> list[ToEngine]:
        """Return the messages in ``inbox``. Never wait, because no other thread fills it."""
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, messages: list[FromEngine]) -> None:
        """Append the engine's messages to ``outbox``."""
        self.outbox.extend(messages)
