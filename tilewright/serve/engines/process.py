"""A single engine process: start, messages, heartbeat and restart.

Knows messages and processes. The listener assigns requests to engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tilewright.errors import TilewrightError, one_line
from tilewright.runtime.messages import (
    EngineReady,
    EngineStartFailed,
    EngineStarting,
    FromEngine,
    Heartbeat,
    NewTokens,
    Shutdown,
    ToEngine,
)
from tilewright.serve.engines.request_tracker import Answer
from tilewright.serve.engines.sockets import FrontSocket, from_engine
from tilewright.serve.web.server_log import say, say_fault, write
from tilewright.serve.web.settings import Replica
from tilewright.utils.child_process import PYTHON, Child, ChildExit

LOADING, READY, DOWN = "loading", "ready", "down"
HEALTHY_SECONDS = 10.0
_LOOK_SECONDS, _MOST_OF_A_LOOK = 0.1, 0.5  # the second bounds a look while this process runs
_ENDING_SECONDS = 3.0
_MAX_RESTARTS, _RESTART_WINDOW = 3, 600.0


class EngineEvents(Protocol):
    """Receives the engine events. ``engine`` is the number of an engine."""

    async def begin(self, engine: int, folder: Path, ready: EngineReady) -> None:
        """Prepare for a started engine with its files in ``folder``. An exception ends it."""

    def starting(self, engine: int, message: EngineStarting) -> None:
        """Report a start's progress."""

    def began(self, engine: int) -> None:
        """Handle that the engine accepts requests."""

    def on_message(self, engine: int, message: Answer) -> None:
        """Handle a message about a request."""

    def lost(self, engine: int, said: str) -> None:
        """Handle the end of the engine process, which may restart."""

    def gone(self, engine: int, said: str) -> None:
        """Handle the final end of the engine. ``said`` begins with the exit code."""


class EngineProcess:
    """The API server's end of a single engine process.

    Args:
        number: engine number, from 0.
        name: name in messages.
        command: arguments after ``python``. ``{}`` is the engine's directory.
        replica: the engine's resources.
        folder: directory for the engine's sockets.
        listener: receives the events.
        hung_seconds: silence after which the engine is killed.

    Attributes:
        state: ``loading``, ``ready`` or ``down``.
        ready: properties from the latest start. None before the first start.
        beat: latest heartbeat.
    """

    def __init__(
        self,
        number: int,
        name: str,
        command: Sequence[str],
        replica: Replica,
        *,
        folder: Path,
        listener: EngineEvents,
        hung_seconds: float,
    ) -> None:
        self.number, self.name = number, name
        self.state = LOADING
        self.ready: EngineReady | None = None
        self.beat = Heartbeat(0, 0, 0, 0, 0, 0)
        self.num_restarts = 0
        self._command, self._replica = (*command, *replica.arguments), replica
        self._folder, self._listener = folder, listener
        self._hung_seconds = hung_seconds
        self._outbox: list[ToEngine] = []
        self._is_flushing = False
        self._socket: FrontSocket | None = None
        self._child: Child | None = None
        self._last_beat = 0.0
        self._restarted: deque[float] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = self._is_gone = False

    @property
    def is_healthy(self) -> bool:
        """Return whether the engine is ready and has sent a recent heartbeat."""
        return self.state == READY and time.monotonic() - self._last_beat < HEALTHY_SECONDS

    @property
    def pid(self) -> int:
        """Return the process's id, or 0 without a process."""
        return self._child.pid if self._child is not None else 0

    def start(self) -> None:
        """Start the process. It accepts requests after it is ready."""
        folder = self._folder / str(self.num_restarts)
        folder.mkdir(mode=0o700, parents=True)
        self.state = LOADING
        self._socket = FrontSocket(folder, partial(self._take_frame, folder=folder))
        command = [part.replace("{}", str(folder)) for part in self._command]
        self._child = Child(
            [*PYTHON, *command],
            what=self.name,
            environment=self._replica.environment,
            cores=self._replica.cores,
        )
        self._tasks = [asyncio.ensure_future(self._watch(self._child))]

    async def close(self) -> None:
        """End the process, first by message."""
        self._is_closing = True
        if self._socket is not None:
            self._socket.send([Shutdown()])
        if self._child is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._child.wait, _ENDING_SECONDS)
            self._kill()
            await loop.run_in_executor(None, self._child.close)
        self._leave()

    def give(self, message: ToEngine) -> None:
        """Send a message, if the engine is ready.

        Messages of the same turn of the event loop are sent as a single frame.
        """
        self._outbox.append(message)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def give_up(self, said: str) -> None:
        """End the engine finally. ``said`` begins with the server's exit code."""
        if self._is_gone:
            return
        self._is_gone, self.state = True, DOWN
        self._kill()
        self._listener.gone(self.number, said)

    def _flush(self) -> None:
        self._is_flushing = False
        messages, self._outbox = self._outbox, []
        if self._socket is not None and self.state == READY and messages:
            self._socket.send(messages)

    def _take_frame(self, data: bytes, *, folder: Path) -> None:
        if self._is_gone:
            return
        try:
            for message in from_engine.decode(data):
                self._receive(message, folder)
        except Exception as error:
            self._give_up_for(error)

    def _receive(self, message: FromEngine, folder: Path) -> None:
        if isinstance(message, NewTokens):  # the most frequent message
            self._listener.on_message(self.number, message)
        elif isinstance(message, Heartbeat):
            self.beat, self._last_beat = message, time.monotonic()
        elif isinstance(message, EngineReady):
            self._tasks.append(asyncio.ensure_future(self._begin(message, folder)))
        elif isinstance(message, EngineStarting):
            self._listener.starting(self.number, message)
        elif isinstance(message, EngineStartFailed):
            self.give_up(f"2 {message.message}")
        else:
            self._listener.on_message(self.number, message)

    async def _begin(self, ready: EngineReady, folder: Path) -> None:
        try:
            await self._listener.begin(self.number, folder, ready)
        except Exception as error:  # no caller awaits this task, so it reports its own errors
            self._give_up_for(error)
            return
        self.ready, self.state, self._last_beat = ready, READY, time.monotonic()
        self._listener.began(self.number)

    def _give_up_for(self, error: Exception) -> None:
        if isinstance(error, TilewrightError):
            self.give_up(f"2 {error}")
            return
        say_fault(error, f"hearing {self.name}")
        self.give_up(f"1 {type(error).__name__}: {one_line(error)}")

    async def _watch(self, child: Child) -> None:
        """Wait for the process's end, and kill it if it hangs.

        Time in which this process is stopped does not count, because a frozen container stops the
        engine too.
        """
        heard, silent, looked = self._last_beat, 0.0, time.monotonic()
        while (ended := child.poll()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
            passed, looked = time.monotonic() - looked, time.monotonic()
            silent += min(passed, _MOST_OF_A_LOOK)
            if self.state != READY or self._last_beat != heard:
                heard, silent = self._last_beat, 0.0
            elif silent > self._hung_seconds:
                self._kill()
        if not self._is_closing and not self._is_gone:
            await asyncio.sleep(_LOOK_SECONDS)  # time for the last messages
            self._take_end(ended)

    def _take_end(self, ended: ChildExit) -> None:
        if self._is_gone:
            return
        write("".join(f"{line}\n" for line in ended.said))
        was_ready, self.state = self.state == READY, DOWN
        self._outbox = []
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > _RESTART_WINDOW:
            self._restarted.popleft()
        said = f"{self.name} ended ({ended.how})"
        self._listener.lost(self.number, said)
        if len(self._restarted) >= _MAX_RESTARTS or (not was_ready and not self.num_restarts):
            self.give_up(f"1 {said}: {ended.last}")
            return
        say(f"{said}; starting it again")
        self._restarted.append(now)
        self.num_restarts += 1
        watcher = asyncio.current_task()
        self._leave(keep=watcher)
        if self._child is not None:
            self._child.close()
        self.start()

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
