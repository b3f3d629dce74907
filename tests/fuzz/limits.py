"""Limits for readers of untrusted bytes: user errors only, bounded memory and time.

`guarded` measures Python's and numpy's memory in this process. `guarded_apart` runs the reader in a
child process with a limited address space, which includes native code. The time limit is CPU time.
A longer wall-clock limit ends waiting readers.
"""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import TilewrightError

CONSTANT_BYTES = 32 << 20
APART_BYTES = 1 << 30  # the address space includes thread stacks and arenas
MAX_MESSAGE = 1500
WAITING = 12
"""Seconds on the clock, for each that may be computed, after which a reader is taken to wait."""
_FAILED = 1


class OvertimeError(BaseException):
    """Not an Exception, because readers must not catch this error."""


def message_of(read: Callable[[], object]) -> str:
    """Return the message if ``read`` refuses its input, else an empty string."""
    try:
        read()
    except TilewrightError as error:
        message = str(error)
        assert message and message.isprintable(), repr(message)
        assert len(message) <= MAX_MESSAGE, message[:200]
        return message
    return ""


def guarded(
    read: Callable[[], object], *, file_size: int, factor: float = 64, seconds: float = 5
) -> str:
    """Run `message_of` with limits: CPU ``seconds``, memory ``factor`` times the file size."""
    tracemalloc.start(1)
    try:
        with _time_limit(seconds):
            message = message_of(read)
        peak = tracemalloc.get_traced_memory()[1]
    except OvertimeError as late:  # the traceback may end anywhere
        raise AssertionError(str(late)) from None
    finally:
        tracemalloc.stop()
    limit = CONSTANT_BYTES + factor * file_size
    assert peak <= limit, f"{peak} bytes for a file of {file_size}: {message}"
    return message


def guarded_apart(
    read: Callable[[], object], *, file_size: int, factor: float = 64, seconds: float = 10
) -> str:
    """Run `guarded` in a forked process, including native allocations and loops."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        _run_in_child(read, sink, int(APART_BYTES + factor * file_size), seconds)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"the reader ended with {code}: {said}"
    return said


def _run_in_child(read: Callable[[], object], sink: int, num_bytes: int, seconds: float) -> None:
    code = _FAILED
    try:
        limit_memory(num_bytes)
        for timer, number, limit in _timers(seconds):
            signal.signal(number, signal.SIG_DFL)  # ends the process
            signal.setitimer(timer, limit)
        said, code = message_of(read), 0
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    try:
        os.write(sink, said.encode("utf-8", "backslashreplace")[:4096])
    finally:
        os._exit(code)


def limit_memory(num_bytes: int) -> None:
    """Limit the process's further address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _timers(seconds: float) -> tuple[tuple[int, signal.Signals, float], ...]:
    """Timers with signals and limits in seconds."""
    computing = signal.ITIMER_PROF, signal.SIGPROF, seconds
    return computing, (signal.ITIMER_REAL, signal.SIGALRM, WAITING * seconds)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise OvertimeError(f"more than {seconds} seconds ({signal.Signals(number).name})")

    timers = _timers(seconds)
    before = [signal.signal(number, late) for _, number, _ in timers]
    try:
        for timer, _, limit in timers:
            signal.setitimer(timer, limit)
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
