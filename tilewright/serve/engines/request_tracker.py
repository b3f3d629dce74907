"""`RequestTracker`: pending requests of the API server, their engines, and the queue limits.

Knows no processes. Messages to engines go through a callable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tilewright.runtime.messages import (
    AbortRequest,
    NewTokens,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    ToEngine,
)
from tilewright.runtime.request import EngineRequest
from tilewright.serve.engines.routing import ReplicaRouter
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import ServerConfig

Answer: TypeAlias = RequestStarted | NewTokens | RequestFinished | RequestFailed
_MAX_RETRY_SECONDS = 600
_MAX_IMAGE_BYTES = 1 << 30  # pixels of waiting requests
_LOOK_SECONDS, _LOOK_SHARE = 1.0, 0.1  # between searches for requests above the queue timeout
_OLD, _NEW = 0.9, 0.1  # weights of the known rate and of a new measurement


@dataclass(slots=True)
class RequestTimes:
    """A request's times: ``time.perf_counter()`` of the process without the engine.

    Attributes:
        sent_at: The message's time to the engine.
        started_at: The slot's time. None: the request waits.
        first_at, last_at: Times of the first and the last tokens.
    """

    sent_at: float
    started_at: float | None = None
    first_at: float | None = None
    last_at: float = 0.0

    def on_tokens(self) -> None:
        """Note the arrival of new tokens."""
        self.last_at = time.perf_counter()
        if self.first_at is None:
            self.first_at = self.last_at

    def on_started(self, message: RequestStarted) -> None:
        """Note the slot's time. The message may come with the first token."""
        if self.started_at is None:
            self.started_at = min(time.perf_counter(), self.sent_at + message.queue_s)

    def finished(self, request_id: int) -> RequestFinished | None:
        """Return the final message for a request. None: it has no token."""
        if self.started_at is None or self.first_at is None:
            return None
        first, last = max(0.0, self.first_at - self.started_at), self.last_at - self.first_at
        return RequestFinished(request_id, "stop", first, last)


@dataclass(slots=True)
class PendingRequest:
    """A submitted request. ``since``: time of arrival. ``index``: its number in ``handle``."""

    message: EngineRequest
    handle: RequestHandle
    index: int
    since: float
    times: RequestTimes

    @property
    def has_started(self) -> bool:
        return self.times.started_at is not None


@dataclass(slots=True, eq=False)
class RequestHandle:
    """Requests with a common waiter. Messages have their request's index.

    Attributes:
        ids: request numbers.
        engines: engine number per started request, by index.
    """

    ids: list[int]
    _tracker: RequestTracker
    engines: dict[int, int] = field(default_factory=dict)
    _found: list[tuple[int, Answer]] = field(default_factory=list)
    _finished: tuple[tuple[int, RequestFinished], ...] = ()  # no memory while a request waits
    _waiter: asyncio.Future[None] | None = None
    _look_timer: asyncio.TimerHandle | None = None
    _heard_at: float = 0.0

    def put(self, index: int, message: Answer) -> None:
        """Receive a message from the tracker."""
        if isinstance(message, RequestFinished):
            self._finished += ((index, message),)
        self._found.append((index, message))
        self._wake()

    async def take(self, patience: float | None = None) -> list[tuple[int, Answer]]:
        """Return all messages since the last call, in order. Wait for the first message.

        Args:
            patience: maximum wait in seconds, approximately. Then the list is empty. None: no
                limit.
        """
        loop = asyncio.get_running_loop()
        if patience is not None:
            self._heard_at = loop.time()
            if self._look_timer is None:  # shared by many calls: tokens arrive often
                self._look_timer = loop.call_later(patience, self._look, patience)
        if not self._found:
            self._waiter = loop.create_future()
            await self._waiter
        messages, self._found = self._found, []
        return messages

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self, patience: float) -> None:
        loop = asyncio.get_running_loop()
        left = self._heard_at + patience - loop.time()
        if left <= 0:
            self._wake()
        self._look_timer = loop.call_later(left if left > 0 else patience, self._look, patience)

    def cancel(self, index: int) -> RequestFinished | None:
        """Cancel the request at ``index``. Return its times, or None before its first token.

        The times are the engine's if it has finished the request, else those of this process.
        """
        return dict(self._finished).get(index) or self._tracker.cancel(self.ids[index])

    def close(self) -> None:
        """Cancel all unfinished requests of this handle."""
        if self._look_timer is not None:
            self._look_timer.cancel()
        for request_id in self.ids:
            self._tracker.cancel(request_id)


class RequestTracker:
    """Keeps pending requests, places them on engines, and passes messages to their handles.

    Args:
        place: Places a request with `router`. Returns the engine number. None: no engine is up.
        send: Sends a message to an engine.
        router: The placed requests' engines.
    """

    def __init__(
        self,
        place: Callable[[EngineRequest], int | None],
        send: Callable[[int, ToEngine], None],
        router: ReplicaRouter,
        settings: ServerConfig,
    ) -> None:
        self._place, self._send, self.router, self._settings = place, send, router, settings
        self._pending: dict[int, PendingRequest] = {}
        self._num_tokens_waiting = self._image_bytes_waiting = 0
        self._rate = 0.0
        self._num_running = 1
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self.num_waiting = 0

    def __len__(self) -> int:
        return len(self._pending)

    def submit(
        self, messages: Sequence[EngineRequest], *, max_context: int, client: str = ""
    ) -> RequestHandle:
        """Submit requests together.

        Each request gets a number, its client, and the number of the first request with the same
        prompt.

        Raises:
            ApiError: 429 with a full queue.
        """
        self._check_room(messages, max_context)
        handle = RequestHandle([], self)
        first: dict[tuple[int, ...], int] = {}
        for index, message in enumerate(messages):
            self._next_id += 1
            like = first.setdefault(message.prompt, self._next_id)
            numbered = msgspec.structs.replace(
                message,
                request_id=self._next_id,
                client=client,
                like=like if like != self._next_id else None,
            )
            handle.ids.append(self._next_id)
            now = time.perf_counter()
            self._pending[self._next_id] = PendingRequest(
                numbered, handle, index, now, RequestTimes(now)
            )
            self._count(numbered, 1)
            self._start(numbered)
        if self._timer is None:
            self._look_later()
        return handle

    def cancel(self, request_id: int) -> RequestFinished | None:
        """Cancel a request, see `RequestHandle.cancel`. A finished request is ignored.

        The engine sends no further message about it.
        """
        pending = self._forget(request_id)
        if pending is None:
            return None
        engine = self.router.leave(request_id)
        if engine is not None:
            self._send(engine, AbortRequest(request_id))
        done = pending.times.finished(request_id)
        if done is not None:
            self._measure(pending.message, done)
        return done

    def on_message(
        self, message: Answer, num_running: int | None = None, *, engine: int = 0
    ) -> None:
        """Pass a message to its handle. ``num_running``: running requests. None: unchanged."""
        pending = self._pending.get(message.request_id)
        if pending is None:
            return
        if num_running is not None:
            self._num_running = max(1, num_running)
        if isinstance(message, NewTokens):
            self.router.advance(message.request_id, len(message.tokens))
            pending.times.on_tokens()
        elif isinstance(message, RequestStarted):
            if not pending.has_started:
                self._count(pending.message, -1)
                pending.handle.engines[pending.index] = engine
            pending.times.on_started(message)
        else:
            if isinstance(message, RequestFinished):
                self._measure(pending.message, message)
            self._forget(message.request_id)
            self.router.leave(message.request_id)
        pending.handle.put(pending.index, message)

    def fail_all(self, code: str, message: str) -> None:
        """Fail all requests."""
        for request_id in list(self._pending):
            self._fail(request_id, code, message)

    def fail_started(self, engine: int, message: str) -> None:
        """Fail a lost engine's started requests. Its waiting requests have no engine now."""
        for request_id in self.router.lose(engine):
            pending = self._pending.get(request_id)
            if pending is not None and pending.has_started:
                self._fail(request_id, "engine_error", message)

    def _fail(self, request_id: int, code: str, message: str) -> None:
        pending = self._pending[request_id]
        self.cancel(request_id)
        pending.handle.put(pending.index, RequestFailed(request_id, code, message))

    def under_way(self) -> list[dict[str, object]]:
        """Return the facts about pending requests for an operator, without their texts."""
        return [
            {
                "id": request_id,
                "state": "running" if pending.has_started else "waiting",
                "prompt_tokens": len(pending.message.prompt),
                "max_tokens": pending.message.sampling.max_tokens,
                "priority": pending.message.priority,
                "engine": self.router.engine_of(request_id),
            }
            for request_id, pending in self._pending.items()
        ]

    def start_waiting(self) -> None:
        """Send the requests without an engine to one."""
        for request_id, pending in list(self._pending.items()):
            if request_id not in self.router:
                pending.times.sent_at = time.perf_counter()
                self._start(pending.message)

    def _start(self, message: EngineRequest) -> None:
        engine = self._place(message)
        if engine is not None:
            self._send(engine, message)

    def _check_room(self, messages: Sequence[EngineRequest], max_context: int) -> None:
        most = self._settings.max_queued_contexts * max_context
        tokens = self._num_tokens_waiting + sum(len(message.prompt) for message in messages)
        is_full = self.num_waiting + len(messages) > self._settings.max_queue
        num_bytes = self._image_bytes_waiting + sum(message.image_bytes for message in messages)
        is_full |= self.num_waiting > 0 and num_bytes > _MAX_IMAGE_BYTES
        if is_full or (self.num_waiting and tokens > most):
            seconds = self._num_tokens_waiting / self._rate if self._rate else 1.0
            after = str(min(_MAX_RETRY_SECONDS, max(1, round(seconds))))
            said = f"{self.num_waiting} requests wait already; try again in {after} s"
            raise ApiError(429, "overloaded", said, headers={"retry-after": after})

    def _count(self, message: EngineRequest, sign: int) -> None:
        self.num_waiting += sign
        self._num_tokens_waiting += sign * len(message.prompt)
        self._image_bytes_waiting += sign * message.image_bytes

    def _forget(self, request_id: int) -> PendingRequest | None:
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.has_started:
            self._count(pending.message, -1)
        return pending

    def _look_later(self) -> None:
        """Start a single timer for all requests, because a thousand may wait."""
        seconds = min(_LOOK_SECONDS, self._settings.queue_timeout * _LOOK_SHARE)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Fail the requests above the queue timeout."""
        latest = time.perf_counter() - self._settings.queue_timeout
        for request_id, pending in list(self._pending.items()):
            if not pending.has_started and pending.since <= latest:
                said = f"waited {self._settings.queue_timeout:g} s in the queue"
                self._fail(request_id, "queue_timeout", said)
        self._timer = None
        if self._pending:
            self._look_later()

    def _measure(self, message: EngineRequest, done: RequestFinished) -> None:
        """Update the prompt token rate per second over all running requests."""
        spent = done.prefill_s + done.decode_s
        if spent > 0:
            rate = len(message.prompt) / spent * self._num_running
            self._rate = _OLD * self._rate + _NEW * rate if self._rate else rate
