"""The front's side of an engine: starts it, asks it, hears it, starts it again when it dies.

Knows token ids and messages; texts and HTTP are for who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from tilewright.compiler.child import PYTHON, Child, Ended
from tilewright.compiler.errors import TilewrightError, one_line
from tilewright.compiler.runtime.grammar import GrammarSpec
from tilewright.compiler.runtime.messages import (
    Beat,
    Forget,
    FromEngine,
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
    Tokens,
)
from tilewright.compiler.runtime.sampling import SamplingParams
from tilewright.compiler.serve.errors import ApiError
from tilewright.compiler.serve.folders import MeetingFolder
from tilewright.compiler.serve.says import say, say_fault, write
from tilewright.compiler.serve.sockets import FrontSocket, from_engine
from tilewright.compiler.serve.tickets import Desk, Limits, Ticket

TOKENIZER = "tokenizer"
"""The folder in which the engine leaves its model's tokenizer for the front."""

LOADING, READY, DOWN = "loading", "ready", "down"
HEALTHY_SECONDS, HUNG_SECONDS = 10.0, 60.0
_LOOK_SECONDS = 0.1
_MAX_RESTARTS, _RESTART_WINDOW = 3, 600.0


class EngineClient:
    """The front's end of its engine process: starts it, asks it, and starts it again.

    Args:
        command: what follows ``python`` and the folder's place in it, ``{}``.
        on_ready: told the folder and what the engine says, each time one is up. What it raises
            ends the client: `ended` tells why.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_ready: Callable[[Path, Ready], Awaitable[None]],
        *,
        limits: Limits | None = None,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        self.state = LOADING
        self.ready: Ready | None = None
        self.beat = Beat(0, 0, 0, 0, 0, 0)
        self.num_restarts = 0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._command = tuple(command)
        self._on_ready = on_ready
        self._desk = Desk(self._give, limits or Limits())
        self._hung_seconds = hung_seconds
        self._outbox: list[ToEngine] = []
        self._is_flushing = False
        self._socket: FrontSocket | None = None
        self._child: Child | None = None
        self._last_beat = 0.0
        self._restarted: deque[float] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._folder = MeetingFolder()

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is up and has been heard of lately."""
        return self.state == READY and time.monotonic() - self._last_beat < HEALTHY_SECONDS

    @property
    def num_live(self) -> int:
        """The number of requests that wait or run in the engine."""
        return len(self._desk)

    @property
    def num_waiting(self) -> int:
        """Requests that the engine has not begun."""
        return self._desk.num_waiting

    def start(self) -> None:
        """Start the engine; requests are taken once it is ready."""
        folder = self._folder.path / str(self.num_restarts)
        folder.mkdir(mode=0o700)
        self.state = LOADING
        self._socket = FrontSocket(folder, partial(self._take_frame, folder=folder))
        command = [part.replace("{}", str(folder)) for part in self._command]
        self._child = Child([*PYTHON, *command], what="the engine")
        self._tasks = [asyncio.ensure_future(self._watch(self._child))]

    async def close(self) -> None:
        """End the engine's process, kindly first, and remove its folder."""
        self._is_closing = True
        if self._socket is not None:
            self._socket.send([Stop()])
        if self._child is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._child.wait, 3.0)
            self._kill()
            await asyncio.get_running_loop().run_in_executor(None, self._child.close)
        self._leave()
        self._folder.remove()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        grammars: Sequence[GrammarSpec | None] = (),
        priority: int = 0,
        cache_salt: str = "",
        client: str = "",
    ) -> Ticket:
        """Ask for answers to prompts that fit; see :class:`Ticket`.

        ``grammars``: what each answer must be; empty: any text. ``cache_salt``: what is computed
        for these prompts is shared with those of the same alone. ``client``: whose they are.

        Raises:
            ApiError: 503 while there is no engine, 429 where too much waits already.
        """
        if self.state != READY or self.ready is None:
            code = "loading" if self.state == LOADING else "engine_down"
            raise ApiError(503, code, f"the engine is {self.state}", headers={"retry-after": "5"})
        obeyed = grammars or [None] * len(prompts)
        messages = [
            Submit(0, tuple(prompt), each, priority, grammar, cache_salt, client)
            for prompt, each, grammar in zip(prompts, sampling, obeyed, strict=True)
        ]
        return self._desk.submit(messages, max_context=self.ready.max_context)

    def under_way(self) -> list[dict[str, object]]:
        """List what an operator may know of each request: nothing of its text."""
        return self._desk.under_way()

    def forget_prefixes(self) -> None:
        """Let no later prompt share what was computed until now."""
        self._give(Forget())

    def fail_all(self, code: str, message: str) -> None:
        """Tell all who wait for answers that none will come, with a code and a message."""
        self._desk.fail(code, message)

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
            self._socket.send(messages)

    def _take_frame(self, data: bytes, *, folder: Path) -> None:
        if self.ended.done():
            return
        try:
            for message in from_engine.decode(data):
                self._hear(message, folder)
        except Exception as error:
            self._end_of(error)

    def _hear(self, message: FromEngine, folder: Path) -> None:
        if isinstance(message, Tokens):  # most are
            self._desk.hear(message, self.beat.num_running)
        elif isinstance(message, Beat):
            self.beat, self._last_beat = message, time.monotonic()
        elif isinstance(message, Ready):
            self._tasks.append(asyncio.ensure_future(self._begin(message, folder)))
        elif isinstance(message, Refused):
            self._end(f"2 {message.message}")
        else:
            self._desk.hear(message, self.beat.num_running)

    async def _begin(self, ready: Ready, folder: Path) -> None:
        try:
            await self._on_ready(folder, ready)
        except Exception as error:  # nobody awaits this task: what ends it is told here
            self._end_of(error)
            return
        self.ready, self.state, self._last_beat = ready, READY, time.monotonic()
        for asked in self._desk.unanswered():  # those that waited when the last engine ended
            self._give(asked)

    def _end_of(self, error: Exception) -> None:
        if isinstance(error, TilewrightError):
            self._end(f"2 {error}")
            return
        say_fault(error, "hearing the engine")
        self._end(f"1 {type(error).__name__}: {one_line(error)}")

    async def _watch(self, child: Child) -> None:
        """Wait for the engine's end; kill it where it hangs."""
        while (ended := child.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.state == READY and time.monotonic() - self._last_beat > self._hung_seconds:
                self._kill()
        if not self._is_closing and not self.ended.done():
            await asyncio.sleep(_LOOK_SECONDS)  # what it said last is still heard
            self._take_end(ended)

    def _take_end(self, ended: Ended) -> None:
        if self.ended.done():
            return
        write("".join(f"{line}\n" for line in ended.said))
        was_ready, self.state = self.state == READY, DOWN
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > _RESTART_WINDOW:
            self._restarted.popleft()
        said = f"the engine ended ({ended.how})"
        self._desk.fail("engine_error", said, started_only=True)
        if len(self._restarted) >= _MAX_RESTARTS or (not was_ready and not self.num_restarts):
            self._end(f"1 {said}: {ended.last}")
            return
        say(f"{said}; starting it again")
        self._restarted.append(now)
        self.num_restarts += 1
        self._outbox = []
        watcher = asyncio.current_task()
        self._leave(keep=watcher)
        if self._child is not None:
            self._child.close()
        self.start()

    @property
    def pid(self) -> int:
        """The id of the engine's process; 0 where there is none."""
        return self._child.pid if self._child is not None else 0

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
            self._socket.close()
            self._socket = None

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
