"""Server log on standard error. Write errors are ignored."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TextIO

from tilewright.errors import one_line

_LINE_CHARACTERS = 2000


def say(text: str) -> None:
    """Write a line to standard error. Write errors are ignored."""
    write(f"tilewright: {' '.join(text.split())[:_LINE_CHARACTERS]}\n")


def tell(text: str) -> None:
    """Write a line of requested output to standard output. Write errors are ignored."""
    write(f"{text}\n", to=sys.stdout)


def write(text: str, *, to: TextIO | None = None) -> None:
    """Write a text without buffers, which would keep the rest after a full disk."""
    stream = to or sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
        os.write(stream.fileno(), text.encode("utf-8", "replace"))


def say_fault(error: BaseException, what: str) -> None:
    """Log an internal error with its stack, and without data from a client."""
    frames = traceback.extract_tb(error.__traceback__)
    write("".join(traceback.format_list(frames)))
    say(f"{what}: {type(error).__name__}: {one_line(error)[:200]}")
