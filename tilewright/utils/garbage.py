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
    """Look after so many new objects, not after 700: imports of torch make a million that stay,
    through which Python would look again and again.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def run_process(main: Callable[[], int]) -> int:
    """Return the exit code of ``main()``. The process ends with it after the exit handlers of
    ``main()``.

    It skips Python's teardown of modules, which frees memory only, and handlers of earlier imports.
    An exception ends the process as usual.
    """
    collect_seldom()
    codes: list[int] = []
    atexit.register(_end, codes)  # the last of them: handlers run in reverse order
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
