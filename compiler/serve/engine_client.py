"""The front's side of an engine: starts it, asks it, hears it, starts it again when it dies.

Knows token ids and messages; texts and HTTP are for who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import zmq
import zmq.asyncio

from tilewright.compiler.child import PYTHON, Child, Ended
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.runtime.grammar import GrammarSpec
from tilewright.compiler.runtime.messages import (
    Beat,
    Cancel,
    Failed,
    Finished,
    FromEngine,
    Ready,
    Refused,
    Started,
    Stop,
    Submit,
    ToEngine,
    Tokens,
)
from tilewright.compiler.runtime.sampling import SamplingParams
from tilewright.compiler.serve.errors import ApiError
from tilewright.compiler.serve.sockets import address, encoder, from_engine

TOKENIZER = "tokenizer"
"""The folder in which the engine leaves its model's tokenizer for the front."""

LOADING, READY, DOWN = "loading", "ready", "down"
HEALTHY_SECONDS, HUNG_SECONDS = 10.0, 60.0
_LOOK_SECONDS = 0.1
_MAX_RESTARTS, _RESTART_WINDOW = 3, 600.0
_MAX_PATH = 100  # of a socket

Answer: TypeAlias = Started | Tokens | Finished | Failed


@dataclass(slots=True)
class _Asked:
    """A request that the engine has, and who waits for it."""

    message: Submit
    ticket: Ticket
    index: int
    has_started: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """One or several requests that are waited for together; their answers come with an index."""

    ids: list[int]
    _client: EngineClient
    _found: deque[tuple[int, Answer]] = field(default_factory=deque)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, index: int, message: Answer) -> None:
        """Called by the client for each message."""
        self._found.append((index, message))
        self._event.set()

    async def take(self) -> list[tuple[int, Answer]]:
        """All that has come since the last call, in order; waits until there is something."""
        await self._event.wait()
        self._event.clear()
        found = list(self._found)
        self._found.clear()
        return found

    def cancel(self, index: int) -> None:
        """One of the requests is not wanted any more."""
        self._client.cancel(self.ids[index])

    def close(self) -> None:
        """None of them is."""
        for request_id in self.ids:
            self._client.cancel(request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may wait: requests, full contexts of prompt tokens, seconds."""

    max_queue: int = 1024
    max_queued_contexts: int = 64
    queue_timeout: float = 600.0


class EngineClient:
    """One engine process at a time.

    Args:
        command: what follows ``python`` and the folder's place in it, ``{}``.
        on_ready: told the folder and what the engine says, each time one is up.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_ready: Callable[[Path, Ready], Awaitable[None]],
        *,
        limits: Limits | None = None,
    ) -> None:
        self.state = LOADING
        self.ready: Ready | None = None
        self.beat = Beat(0, 0, 0, 0, 0, 0)
        self.num_restarts = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._command = tuple(command)
        self._on_ready = on_ready
        self._limits = limits or Limits()
        self._asked: dict[int, _Asked] = {}
        self._num_waiting = self._tokens_waiting = 0
        self._rate = 0.0
        self._next_id = 0
        self._outbox: list[ToEngine] = []
        self._is_flushing = False
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._child: Child | None = None
        self._last_beat = 0.0
        self._restarted: deque[float] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-serve-")
        if len(self._folder.name) > _MAX_PATH - 8:
            name = self._folder.name
            raise ConfigError(f"{name}: too long for a socket; allowed: a shorter TMPDIR")

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is up and has been heard of lately."""
        return self.state == READY and time.monotonic() - self._last_beat < HEALTHY_SECONDS

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._asked)

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not begun."""
        return self._num_waiting

    def start(self) -> None:
        """Start the engine; requests are taken once it is ready."""
        folder = Path(self._folder.name) / str(self.num_restarts)
        folder.mkdir(mode=0o700)
        self.state = LOADING
        self._socket = self._context.socket(zmq.PAIR)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(limit, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(folder))
        command = [part.replace("{}", str(folder)) for part in self._command]
        self._child = Child([*PYTHON, *command], what="the engine")
        self._tasks = [
            asyncio.ensure_future(self._listen(self._socket, folder)),
            asyncio.ensure_future(self._watch(self._child)),
        ]

    async def close(self) -> None:
        """End the engine, kindly first; nothing is left of it."""
        self._is_closing = True
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                await self._socket.send(encoder.encode([Stop()]))
        if self._child is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._child.wait, 3.0)
            self._kill()
            await asyncio.get_running_loop().run_in_executor(None, self._child.close)
        self._leave()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        grammars: Sequence[GrammarSpec | None] = (),
        priority: int = 0,
    ) -> Ticket:
        """Ask for answers to prompts that fit; see :class:`Ticket`.

        ``grammars``: what each answer must be; empty: any text.

        Raises:
            ApiError: 503 while there is no engine, 429 where too much waits already.
        """
        if self.state != READY or self.ready is None:
            code = "loading" if self.state == LOADING else "engine_down"
            raise ApiError(503, code, f"the engine is {self.state}", headers={"retry-after": "5"})
        self._check_room(prompts)
        ticket = Ticket([], self)
        obeyed = grammars or [None] * len(prompts)
        for index, (prompt, each, grammar) in enumerate(
            zip(prompts, sampling, obeyed, strict=True)
        ):
            self._next_id += 1
            message = Submit(self._next_id, tuple(prompt), each, priority, grammar)
            ticket.ids.append(self._next_id)
            self._asked[self._next_id] = _Asked(message, ticket, index)
            self._count(message, 1)
            self._give(message)
        loop = asyncio.get_running_loop()
        loop.call_later(self._limits.queue_timeout, self._expire, list(ticket.ids))
        return ticket

    def cancel(self, request_id: int) -> None:
        """End a request; one that has ended already is ignored."""
        if self._forget(request_id) is not None:
            self._give(Cancel(request_id))

    def fail_all(self, code: str, message: str) -> None:
        """Tell all who wait that nothing will come."""
        for request_id in list(self._asked):
            asked = self._asked[request_id]
            self.cancel(request_id)
            asked.ticket.put(asked.index, Failed(request_id, code, message))

    def _check_room(self, prompts: Sequence[Sequence[int]]) -> None:
        assert self.ready is not None
        most = self._limits.max_queued_contexts * self.ready.max_context
        tokens = self._tokens_waiting + sum(map(len, prompts))
        is_full = self._num_waiting + len(prompts) > self._limits.max_queue
        if is_full or (self._num_waiting and tokens > most):
            seconds = self._tokens_waiting / self._rate if self._rate else 1.0
            after = str(min(600, max(1, round(seconds))))
            raise ApiError(
                429,
                "overloaded",
                f"{self._num_waiting} requests wait already; try again in {after} s",
                headers={"retry-after": after},
            )

    def _count(self, message: Submit, sign: int) -> None:
        self._num_waiting += sign
        self._tokens_waiting += sign * len(message.prompt)

    def _forget(self, request_id: int) -> _Asked | None:
        asked = self._asked.pop(request_id, None)
        if asked is not None and not asked.has_started:
            self._count(asked.message, -1)
        return asked

    def _expire(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            asked = self._asked.get(request_id)
            if asked is not None and not asked.has_started:
                self.cancel(request_id)
                said = f"waited {self._limits.queue_timeout:g} s in the queue"
                asked.ticket.put(asked.index, Failed(request_id, "queue_timeout", said))

    def _give(self, message: ToEngine) -> None:
        """What is asked in one turn of the event loop travels as one frame."""
        self._outbox.append(message)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        messages, self._outbox = self._outbox, []
        if self._socket is not None and self.state == READY and messages:
            self._socket.send(encoder.encode(messages))

    async def _listen(self, socket: zmq.asyncio.Socket, folder: Path) -> None:
        while True:
            for message in from_engine.decode(await socket.recv()):
                await self._hear(message, folder)

    async def _hear(self, message: FromEngine, folder: Path) -> None:
        if isinstance(message, Beat):
            self.beat, self._last_beat = message, time.monotonic()
        elif isinstance(message, Ready):
            await self._on_ready(folder, message)
            self.ready, self.state, self._last_beat = message, READY, time.monotonic()
            for asked in self._asked.values():  # who waited when the last engine ended
                self._give(asked.message)
        elif isinstance(message, Refused):
            self._end(f"2 {message.message}")
        else:
            self._pass_on(message)

    def _pass_on(self, message: Answer) -> None:
        asked = self._asked.get(message.request_id)
        if asked is None:
            return
        if isinstance(message, Started) and not asked.has_started:
            asked.has_started = True
            self._count(asked.message, -1)
        elif isinstance(message, Finished):
            spent = message.prefill_s + message.decode_s
            if spent > 0:
                rate = len(asked.message.prompt) / spent * max(1, self.beat.num_running)
                self._rate = 0.9 * self._rate + 0.1 * rate if self._rate else rate
        if isinstance(message, Finished | Failed):
            self._forget(message.request_id)
        asked.ticket.put(asked.index, message)

    async def _watch(self, child: Child) -> None:
        """Wait for the engine's end; kill it where it hangs."""
        while (ended := child.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.state == READY and time.monotonic() - self._last_beat > HUNG_SECONDS:
                self._kill()
        if not self._is_closing and not self.ended.done():
            await asyncio.sleep(_LOOK_SECONDS)  # what it said last is still heard
            self._take_end(ended)

    def _take_end(self, ended: Ended) -> None:
        if self.ended.done():
            return
        print("\n".join(ended.said), file=sys.stderr)
        was_ready, self.state = self.state == READY, DOWN
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > _RESTART_WINDOW:
            self._restarted.popleft()
        said = f"the engine ended ({ended.how})"
        for request_id, asked in list(self._asked.items()):
            if asked.has_started:
                self._forget(request_id)
                asked.ticket.put(asked.index, Failed(request_id, "engine_error", said))
        if len(self._restarted) >= _MAX_RESTARTS or (not was_ready and not self.num_restarts):
            self._end(f"1 {said}: {ended.last}")
            return
        print(f"tilewright: {said}; starting it again", file=sys.stderr)
        self._restarted.append(now)
        self.num_restarts += 1
        self._outbox = []
        watcher = asyncio.current_task()
        self._leave(keep=watcher)
        if self._child is not None:
            self._child.close()
        self.start()

    def _end(self, said: str) -> None:
        """There is no engine any more, and there will be none; ``said`` begins with the code."""
        self.state = DOWN
        self.fail_all("engine_down", said.partition(" ")[2])
        if not self.ended.done():
            self.ended.set_result(said)

    def _leave(self, keep: asyncio.Task[None] | None = None) -> None:
        for task in self._tasks:
            if task is not keep:
                task.cancel()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
