"""An engine's own process, from outside: started, asked, watched, ended.

One that crashes or hangs costs its own row alone: every failure is a `WorkerError` of one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bench.peers.protocol import Generated, Loaded

_CLOSING_SECONDS = 5
_SETTLING_SECONDS = 5
_LOOK_SECONDS = 0.05
_STILL_LOOKS = 3
_MOST_CHARACTERS = 300


class WorkerError(Exception):
    """Why an engine gave no answer, in one line."""


class Worker:
    """A process that speaks `protocol`; it is killed where an answer takes ``timeout_s``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **(environment or {})},
            encoding="utf-8",
            errors="replace",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reader.start()

    def loaded(self) -> Loaded:
        """Wait until the engine is loaded. Raises WorkerError."""
        values = self._answer()
        return self._checked(lambda: Loaded(int(values["weight_bytes"]), values["step_bytes"]))

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """One continuation. Raises WorkerError."""
        asked = json.dumps({"tokens": list(tokens), "num_tokens": num_tokens})
        with contextlib.suppress(OSError):  # it has gone; the answer says how
            self._requests.write(asked + "\n")
            self._requests.flush()
        values = self._answer()

        def read() -> Generated:
            found = Generated(tuple(values["tokens"]), tuple(map(float, values["times"])))
            if len(found.times) != num_tokens:
                raise ValueError
            return found

        return self._checked(read)

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
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0  # it has ended, or this is no Linux
        user, system = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    def close(self) -> None:
        """End the process: it ends by itself when its input does, else it is killed."""
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise WorkerError(f"no answer within {self._timeout_s:g} s; killed") from None
        if not line:
            self._lines.put(line)  # whoever asks again hears it again
            raise WorkerError(self._end())
        values = self._checked(lambda: json.loads(line))
        if not isinstance(values, dict):
            raise WorkerError(f"gave an answer that is none: {line[:_MOST_CHARACTERS]!r}")
        if "error" in values:
            raise WorkerError(str(values["error"])[:_MOST_CHARACTERS])
        return values

    def _checked(self, read: Any) -> Any:
        try:
            return read()
        except (KeyError, TypeError, ValueError):
            raise WorkerError("gave an answer that is none") from None

    def _end(self) -> str:
        """How the process ended, with the last line it wrote to standard error."""
        try:
            code = self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        how = f"exit code {code}"
        if code < 0:
            try:
                how = signal.Signals(-code).name
            except ValueError:
                how = f"signal {-code}"
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"ended with {how}" + (f": {last[:_MOST_CHARACTERS]}" if last else "")
