"""Garbage collection and the end of a command's process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Callable

_NEW_OBJECTS = 10_000


def collect_seldom() -> None:
    """Collect garbage less often than Python's default of 700 new objects.

    An import of torch creates a million permanent objects, and each collection would visit them.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def run_process(main: Callable[[], int]) -> int:
    """Run ``main()`` and its exit handlers, then end the process with its exit code.

    This skips module teardown, which only frees memory, and exit handlers from earlier imports.
    An exception ends the process as usual.
    """
    collect_seldom()
    codes: list[int] = []
    atexit.register(_end, codes)  # handlers run in reverse order, so this is the last
    codes.append(main())
    return codes[0]


def _end(codes: list[int]) -> None:
    if not codes or sys.gettrace() or sys.getprofile():  # coverage and profilers report at exit
        return
    with contextlib.suppress(OSError, ValueError):  # Python reports a failed flush
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None: closed before the start
                stream.flush()
        os._exit(codes[0])
