"""An engine's own process, from outside: asked, watched until it is idle, ended.

One that crashes or hangs costs its own row alone: every failure is a `WorkerError` of one line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.peers.protocol import Generated, Loaded
from tilewright.compiler.child import Child, Ended

_CLOSING_SECONDS = 5
_SETTLING_SECONDS = 5
_LOOK_SECONDS = 0.05
_STILL_LOOKS = 3
_MOST_CHARACTERS = 300
_T = TypeVar("_T")


class WorkerError(Exception):
    """Why an engine gave no answer, in one line."""


class Worker:
    """A process that speaks `protocol`; it is killed where an answer takes ``timeout_s``."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._child = Child(command, has_pipes=True, environment=environment, what="an engine")

    def loaded(self) -> Loaded:
        """Wait until the engine is loaded. Raises WorkerError."""
        return self._answer(Loaded)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """One continuation. Raises WorkerError."""
        asked = {"tokens": list(tokens), "num_tokens": num_tokens}
        self._child.write(msgspec.json.encode(asked) + b"\n")
        found = self._answer(Generated)
        if len(found.times) != num_tokens:
            raise WorkerError(f"gave an answer that is none: {len(found.times)} times")
        return found

    def settle(self) -> None:
        """Wait until the process is idle: thread pools spin for a second or more after their work,
        on the very cores that the next engine needs.
        """
        deadline = time.monotonic() + _SETTLING_SECONDS
        used, still = self._ticks(), 0
        while still < _STILL_LOOKS and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now = self._ticks()
            still = still + 1 if now == used else 0
            used = now

    def _ticks(self) -> int:
        """Processor time of all its threads so far, in the kernel's ticks."""
        try:
            stat = Path(f"/proc/{self._child.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0  # it has ended, or this is no Linux
        user, system = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    def close(self) -> Ended:
        """End the process: it ends by itself when its input does, else it is killed."""
        return self._child.close(_CLOSING_SECONDS)

    def _answer(self, kind: type[_T]) -> _T:
        line = self._child.read_line(self._timeout_s)
        if line is None:
            self._child.stop()
            raise WorkerError(f"no answer within {self._timeout_s:g} s; killed")
        if not line:
            ended = self._child.wait(_CLOSING_SECONDS)
            if ended is None:
                raise WorkerError("closed its output")
            said = f": {ended.last[:_MOST_CHARACTERS]}" if ended.last else ""
            raise WorkerError(f"ended with {ended.how}{said}")
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            if "error" not in values:
                return msgspec.convert(values, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            said = line.decode(errors="replace").strip()[:_MOST_CHARACTERS]
            raise WorkerError(f"gave an answer that is none: {said!r}") from None
        raise WorkerError(str(values["error"])[:_MOST_CHARACTERS])
