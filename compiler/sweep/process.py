"""One cell's process: started apart, watched, ended; what came of it in one line.

A cell that crashes, hangs or runs out of memory costs itself alone, and never outlives its sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.bench.json_lines import is_json
from tilewright.compiler.bench.record import Result
from tilewright.compiler.bench.results import loads
from tilewright.compiler.errors import ConfigError, one_line
from tilewright.compiler.sweep.journal import Outcome

RUN = (sys.executable, "-P", "-m", "tilewright.compiler.cli", "run")

_MAX_REASON = 300
_ENDING_SECONDS = 2
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "cannot allocate", "failed to alloc")
_PR_SET_PDEATHSIG = 1
_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cell's process ended."""

    outcome: Outcome
    seconds: float
    reason: str = ""
    result: Result | None = None


class CellProcess:
    """A running cell. ``max_bytes``: of memory it may allocate, None for what there is."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        timeout_s: float,
        max_bytes: int | None = None,
        command: Sequence[str] = RUN,
    ) -> None:
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._num_kills = _oom_kills()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `_finish`)
        self._log = log
        self._stopped: Outcome | None = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as errors:
                self._log_start = errors.tell()
                self._process = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=errors,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                    preexec_fn=_before_start(os.getpid(), max_bytes),
                )
        except (OSError, subprocess.SubprocessError) as error:
            self._output.close()
            reason = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{log}: a cell cannot be started ({reason})") from None

    def poll(self) -> Ending | None:
        """How it ended, or None while it runs; one that takes too long is ended."""
        code = self._process.poll()
        if code is None and self._seconds() > self._timeout_s:
            self._stopped = "timed out"
            code = self._kill()
        return None if code is None else self._finish(code)

    def stop(self) -> Ending:
        """End it now: it was cancelled."""
        self._stopped = "cancelled"
        return self._finish(self._kill())

    def _kill(self) -> int:
        """End the whole group, kindly first: a compilation then gives its folders back."""
        for number, patience in ((signal.SIGINT, _ENDING_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _finish(self, code: int) -> Ending:
        seconds = self._seconds()
        self._output.seek(0)
        output = self._output.read().decode("utf-8", errors="replace")
        self._output.close()
        if self._stopped is not None:
            after = f"after {seconds:.0f} s"
            return Ending(self._stopped, seconds, after)
        last = output.strip().rpartition("\n")[2]
        if code == 0 and is_json(last.encode()):
            try:
                return Ending("done", seconds, result=loads(last, place="result"))
            except ConfigError as error:
                return Ending("failed", seconds, str(error)[:_MAX_REASON])
        return self._failure(code, seconds)

    def _failure(self, code: int, seconds: float) -> Ending:
        said = self._said()
        last = next((line for line in reversed(said) if line), "said nothing")
        how = f"exit code {code}" if code >= 0 else f"killed by {_signal_name(code)}"
        reason = f"{how}: {last}"[:_MAX_REASON]
        if not reason.isprintable():
            reason = repr(reason)
        was_killed = code == -signal.SIGKILL and _oom_kills() > self._num_kills
        complained = any(mark.lower() in line.lower() for line in said for mark in _OUT_OF_MEMORY)
        return Ending("out of memory" if was_killed or complained else "failed", seconds, reason)

    def _said(self) -> list[str]:
        """The lines this attempt wrote on standard error, at most the last few of them."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - 8192))
                return file.read().decode("utf-8", errors="replace").strip().split("\n")[-20:]
        except OSError:
            return []


def _before_start(parent: int, max_bytes: int | None) -> Callable[[], None]:
    """What the child does first: die with its sweep, be the kernel's first choice, keep a limit."""
    library = ctypes.CDLL(None)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    is_bound = max_bytes is not None and hard != resource.RLIM_INFINITY
    limit = min(max_bytes or 0, hard) if is_bound else max_bytes

    def prepare() -> None:
        if sys.platform == "linux":
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
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


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
