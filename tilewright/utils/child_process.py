"""Child processes with limits and monitoring. Ending a child ends its whole process group.

A crash, a hang or a memory shortage affects the child only. No child outlives its parent. The
caller defines a child's work and the meaning of its output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tilewright.errors import ConfigError, one_line

PYTHON = (sys.executable, "-P")
"""Begins the command of a Python child: it imports nothing from the working directory, where a
user may have a ``models/`` or ``compiler/`` of their own."""

_ENDING_SECONDS = 2.0
_LOOK_SECONDS = 0.02
_SAID_BYTES, _SAID_LINES = 8192, 20
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "cannot allocate", "failed to alloc")
_PR_SET_PDEATHSIG = 1
_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child process ended.

    Attributes:
        code: Exit code. Negative: number of the signal.
        seconds: Run time.
        said: Last lines on standard error, oldest first.
        is_timed_out: The child exceeded its time limit and was stopped.
        is_out_of_memory: The kernel killed the child for memory, or the child reported a shortage.
    """

    code: int
    seconds: float
    said: tuple[str, ...] = ()
    is_timed_out: bool = False
    is_out_of_memory: bool = False

    @property
    def how(self) -> str:
        """Return ``exit code 3``, ``SIGKILL``, or ``signal 40`` for unnamed signals."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def last(self) -> str:
        """Return the last nonblank line on standard error, or an empty text."""
        return next((line.strip() for line in reversed(self.said) if line.strip()), "")


class Child:
    """A running child process in its own session.

    As a context manager, it is stopped at the block's end.

    Args:
        command: Program and arguments. Python children begin with `PYTHON`.
        log: File to append standard error to. None: a temporary file.
        timeout_s: Time limit in seconds from the start, applied by `poll`, `wait` and `read`. None:
            no limit.
        max_bytes: Memory limit in bytes. None: no limit.
        has_pipes: Communicate with `write` and `read`. False: standard input is empty, and `output`
            returns the output after the end.
        environment: Variables in addition to this process's own.
        cores: CPUs for the child and its descendants. Empty: this process's CPUs.
        what: Name in error messages.

    Raises:
        ConfigError: The child cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
        has_pipes: bool = False,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        what: str = "a process",
    ) -> None:
        self._timeout_s, self._started = timeout_s, time.monotonic()
        self._num_kills = _oom_kills()
        self._is_timed_out = False
        self._ended: ChildExit | None = None
        self._unread = b""
        self._files = contextlib.ExitStack()
        try:
            self._output = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            self._errors = self._files.enter_context(_open_log(log))
            self._errors_start = self._errors.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else self._output,
                stderr=self._errors,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,
                preexec_fn=_before_start(os.getpid(), max_bytes, cores),
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._files.close()
            reason = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{what} cannot be started ({reason})") from None
        if self._process.stdout is not None:
            self._files.enter_context(self._process.stdout)

    @property
    def pid(self) -> int:
        """Return the process id, which is also the process group id."""
        return self._process.pid

    def poll(self) -> ChildExit | None:
        """Return the child's end, or None while running. Stop the child after its time
        limit.
        """
        if self._ended is not None:
            return self._ended
        if self._process.poll() is None:
            if self._timeout_s is None or self._seconds() <= self._timeout_s:
                return None
            self._is_timed_out = True
            return self.stop()
        return self._finish()

    def wait(self, seconds: float | None = None) -> ChildExit | None:
        """Wait for the child's end. Return None after ``seconds``."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (ended := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)
        return ended

    def stop(self) -> ChildExit:
        """End the process group. Send an interrupt first, to allow cleanup."""
        if self._ended is not None:
            return self._ended
        for number, patience in ((signal.SIGINT, _ENDING_SECONDS), (signal.SIGKILL, None)):
            self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        self._signal(signal.SIGKILL)
        self._process.wait()
        return self._finish()

    def kill(self) -> ChildExit:
        """Kill the process group immediately."""
        if self._ended is not None:
            return self._ended
        self._signal(signal.SIGKILL)
        self._process.wait()
        return self._finish()

    def write(self, data: bytes) -> None:
        """Send bytes to standard input. If the child has closed the pipe, nothing is sent. See
        `wait`.
        """
        assert self._process.stdin is not None, "started without pipes"
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the child's standard input, to signal its work's end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def read(self, seconds: float | None = None) -> bytes | None:
        """Return the next output bytes, or ``b""`` at the output's end.

        Return None after ``seconds``, or at the child's time limit. In the latter case the child is
        stopped.
        """
        assert self._process.stdout is not None, "started without pipes"
        limits = [] if seconds is None else [seconds]
        if self._timeout_s is not None:
            limits.append(self._timeout_s - self._seconds())
        found, self._unread = self._unread, b""
        if found:
            return found
        patience = max(0.0, min(limits)) if limits else None
        if select.select([self._process.stdout], [], [], patience)[0]:
            return os.read(self._process.stdout.fileno(), 1 << 16)
        self.poll()
        return None

    def read_line(self, seconds: float | None = None) -> bytes | None:
        """Return the next output line with its line end. A last line may have none.

        Return None as `read`. An incomplete line is stored for the next call.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        found = b""
        while b"\n" not in found:
            chunk = self.read(None if deadline is None else deadline - time.monotonic())
            if chunk is None:
                self._unread = found
                return None
            if not chunk:
                return found
            found += chunk
        line, end, self._unread = found.partition(b"\n")
        return line + end

    def output(self) -> bytes:
        """Return an ended child's whole output without pipes."""
        assert self._ended is not None, "still running"
        self._output.seek(0)
        return self._output.read()

    def close(self, patience_s: float = 0.0) -> ChildExit:
        """Close the input, wait ``patience_s`` seconds, then stop the child. Close its files."""
        self.close_input()
        ended = self.wait(patience_s) or self.stop()
        self._files.close()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close_input()
        self.stop()
        self._files.close()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _finish(self) -> ChildExit:
        said = self._said()
        code = self._process.returncode
        was_killed = code == -signal.SIGKILL and _oom_kills() > self._num_kills
        complained = any(mark.lower() in line.lower() for line in said for mark in _OUT_OF_MEMORY)
        self._ended = ChildExit(
            code, self._seconds(), said, self._is_timed_out, was_killed or complained
        )
        return self._ended

    def _said(self) -> tuple[str, ...]:
        """Return the last lines that this child wrote to standard error."""
        with contextlib.suppress(OSError, ValueError):
            end = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(self._errors_start, end - _SAID_BYTES))
            text = self._errors.read().decode("utf-8", errors="replace").strip()
            return tuple(text.split("\n")[-_SAID_LINES:])
        return ()


def _open_log(log: Path | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab+")


def _before_start(parent: int, max_bytes: int | None, cores: Sequence[int]) -> Callable[[], None]:
    """Return the function to run in the child before its program.

    It enables interrupts (a background shell may ignore them), ends the child with its parent,
    makes the child the kernel's first choice for memory shortage, and applies the memory limit and
    cores.
    """
    library = ctypes.CDLL(None)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    is_bound = max_bytes is not None and hard != resource.RLIM_INFINITY
    limit = min(max_bytes or 0, hard) if is_bound else max_bytes

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own where the child is Python
        if sys.platform == "linux":
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent ended before the call
                os._exit(1)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        if cores:
            os.sched_setaffinity(0, cores)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return prepare


def _oom_kills() -> int:
    """Return the number of processes in this container killed for memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OOM_EVENTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
