"""A child process: started apart from its parent, watched, and ended with all that it started.

One that crashes, hangs or runs out of memory costs itself alone, and none outlives its parent. What
a child is asked to do, and what its output means, is for who starts it.
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
class Ended:
    """How a child process ended: its exit status, or that its time was up.

    Attributes:
        code: its exit code; below zero the number of the signal that killed it.
        seconds: from its start to its end.
        said: the last lines it wrote on standard error, oldest first.
        is_timed_out: it ran longer than it was given, and was stopped.
        is_out_of_memory: the kernel ended it for want of memory, or it complained of that.
    """

    code: int
    seconds: float
    said: tuple[str, ...] = ()
    is_timed_out: bool = False
    is_out_of_memory: bool = False

    @property
    def how(self) -> str:
        """``exit code 3``, ``SIGKILL`` or, of a signal without a name, ``signal 40``."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def last(self) -> str:
        """The last line on standard error that is not blank; empty where there is none."""
        return next((line.strip() for line in reversed(self.said) if line.strip()), "")


class Child:
    """A running child process, in a session of its own.

    As a context manager it is stopped, if it still runs, where the block ends.

    Args:
        command: the program and its arguments; `PYTHON` begins that of a Python child.
        log: the file that standard error is appended to; None keeps it until the end only.
        timeout_s: seconds from the start after which `poll`, `wait` and `read` stop it; None for
            as many as it takes.
        max_bytes: of memory that it may allocate; None for what there is.
        has_pipes: whether it is talked with: `write` and `read`. Otherwise its standard input is
            empty, and `output` gives what it wrote once it has ended.
        environment: variables besides this process's own.
        cores: CPUs that it, and all it starts, may run on; empty: those that this process may.
        what: who cannot be started, in the error that says so.

    Raises:
        ConfigError: where it cannot be started.
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
        self._ended: Ended | None = None
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
        """The id of its process, which is also that of its process group."""
        return self._process.pid

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs; one that takes too long is stopped."""
        if self._ended is not None:
            return self._ended
        if self._process.poll() is None:
            if self._timeout_s is None or self._seconds() <= self._timeout_s:
                return None
            self._is_timed_out = True
            return self.stop()
        return self._finish()

    def wait(self, seconds: float | None = None) -> Ended | None:
        """Wait for the child's end; None where it still runs after so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (ended := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_SECONDS)
        return ended

    def stop(self) -> Ended:
        """End it and all it started, kindly first: an interrupt lets it take back what it began."""
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

    def kill(self) -> Ended:
        """End it and all it started at once, whatever state it is in."""
        if self._ended is not None:
            return self._ended
        self._signal(signal.SIGKILL)
        self._process.wait()
        return self._finish()

    def write(self, data: bytes) -> None:
        """Send bytes to its standard input; nothing where it has closed that: `wait` says why."""
        assert self._process.stdin is not None, "started without pipes"
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the child's standard input, which it reads as the end of its work."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def read(self, seconds: float | None = None) -> bytes | None:
        """Read what the child writes next on its output; ``b""`` once that is closed.

        None where nothing came within so many seconds, or the child's own time is up: it is then
        stopped, and `wait` says so.
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
        """The next line of its output with its end; without one where the output ended.

        None as `read` gives it; what came of the line until then is kept for the next call.
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
        """All it wrote on its output, without pipes, once it has ended."""
        assert self._ended is not None, "still running"
        self._output.seek(0)
        return self._output.read()

    def close(self, patience_s: float = 0.0) -> Ended:
        """End its input, give it so long to end by itself, then stop it; its files are closed."""
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

    def _finish(self) -> Ended:
        said = self._said()
        code = self._process.returncode
        was_killed = code == -signal.SIGKILL and _oom_kills() > self._num_kills
        complained = any(mark.lower() in line.lower() for line in said for mark in _OUT_OF_MEMORY)
        self._ended = Ended(
            code, self._seconds(), said, self._is_timed_out, was_killed or complained
        )
        return self._ended

    def _said(self) -> tuple[str, ...]:
        """The last lines of standard error, of this child alone where a log has those of others."""
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
    """What the child does first: hear interrupts, which a parent started in the background of a
    shell may ignore; die with its parent, be the kernel's first choice where memory is short, keep
    to its limit and its cores.
    """
    library = ctypes.CDLL(None)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    is_bound = max_bytes is not None and hard != resource.RLIM_INFINITY
    limit = min(max_bytes or 0, hard) if is_bound else max_bytes

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own where the child is Python
        if sys.platform == "linux":
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        if cores:
            os.sched_setaffinity(0, cores)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return prepare


def _oom_kills() -> int:
    """Processes of this container that the kernel has ended for want of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OOM_EVENTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
