"""One engine in a process of its own: started, heard, watched, and started anew when it dies.

Knows messages and processes; which request goes to which engine is for who listens to it.
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
HEALTHY_SECONDS, HUNG_SECONDS = 10.0, 60.0
_LOOK_SECONDS, _MOST_OF_A_LOOK = 0.1, 0.5  # what a look takes while nobody stops this process
_ENDING_SECONDS = 3.0
_MAX_RESTARTS, _RESTART_WINDOW = 3, 600.0


class EngineEvents(Protocol):
    """Who hears engines, each by its number."""

    async def begin(self, engine: int, folder: Path, ready: EngineReady) -> None:
        """It is up, and has left in ``folder`` what its front needs; what this raises ends it."""

    def began(self, engine: int) -> None:
        """Hear that the engine takes requests from now on."""

    def hear(self, engine: int, message: Answer) -> None:
        """Hear what the engine says of a request."""

    def lost(self, engine: int, said: str) -> None:
        """Hear that the engine's process has ended, with all it held; another may follow."""

    def gone(self, engine: int, said: str) -> None:
        """Hear that no other engine follows; ``said`` begins with the exit code for that."""


class EngineProcess:
    """The front's end of one engine process.

    Args:
        number: of this engine, from 0.
        name: what it is called where its end is told.
        command: what follows ``python`` and the folder's place in it, ``{}``.
        replica: what it has of its own.
        folder: its own, to meet in.

    Attributes:
        state: ``loading``, ``ready`` or ``down``.
        ready: what it said of itself when it came up last; None before that.
        beat: what it said last of what it holds.
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
        hung_seconds: float = HUNG_SECONDS,
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
        """Whether it is up and has been heard of lately."""
        return self.state == READY and time.monotonic() - self._last_beat < HEALTHY_SECONDS

    @property
    def pid(self) -> int:
        """The id of its process; 0 where there is none."""
        return self._child.pid if self._child is not None else 0

    def start(self) -> None:
        """Start the process; it takes requests once it is ready."""
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
        """End the process, kindly first."""
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
        """Tell it something; what is told in one turn of the event loop travels as one frame, and
        nowhere while it is not ready.
        """
        self._outbox.append(message)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def give_up(self, said: str) -> None:
        """End it for good; ``said`` begins with the exit code that this is worth."""
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
                self._hear(message, folder)
        except Exception as error:
            self._give_up_for(error)

    def _hear(self, message: FromEngine, folder: Path) -> None:
        if isinstance(message, NewTokens):  # most are
            self._listener.hear(self.number, message)
        elif isinstance(message, Heartbeat):
            self.beat, self._last_beat = message, time.monotonic()
        elif isinstance(message, EngineReady):
            self._tasks.append(asyncio.ensure_future(self._begin(message, folder)))
        elif isinstance(message, EngineStartFailed):
            self.give_up(f"2 {message.message}")
        else:
            self._listener.hear(self.number, message)

    async def _begin(self, ready: EngineReady, folder: Path) -> None:
        try:
            await self._listener.begin(self.number, folder, ready)
        except Exception as error:  # nobody awaits this task: what ends it is told here
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
        """Wait for the process's end; kill it where it hangs. Time in which this process does not
        run is not counted: in a container that is frozen the engine is as well.
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
            await asyncio.sleep(_LOOK_SECONDS)  # what it said last is still heard
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
