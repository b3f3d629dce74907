"""Terminal progress on standard error. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

_REDRAW_S = 0.1
_NEW_LINE_S, _SAME_LINE_S = 1.0, 5.0
"""Seconds before a plain line about other work, and between lines about the same work."""


class StatusLine:
    """A dim line about the current work. The next line replaces it.

    Without a terminal, `note` writes plain lines, and a thread writes lines about slow work: a line
    for work of over a second, and a line with the elapsed seconds every five seconds.
    """

    def __init__(self) -> None:
        self._shown_at = 0.0
        self._work, self._how_far, self._began = "", "", self._shown_at
        self._stop: threading.Event | None = None

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        if not sys.stderr.isatty():
            self.clear()
        else:
            self._write(f"\r\x1b[K{self._dim(text[:100])}\r")

    def progress(self, what: str, done: int, total: int) -> None:
        """Report compile progress. A terminal is redrawn up to ten times a second."""
        now = time.monotonic()
        if what != self._work:
            self._work, self._began = what, now
        self._how_far = f"{what} {100 * done // total} %" if 0 < done <= total else f"{what} ..."
        if sys.stderr.isatty():
            if now - self._shown_at > _REDRAW_S:
                self._shown_at = now
                self.show(self._how_far)
        elif self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._write_progress, args=(self._stop,), daemon=True).start()

    def _write_progress(self, stop: threading.Event) -> None:
        for is_new in self._due_lines(stop, _SAME_LINE_S):
            spent = time.monotonic() - self._began
            self._write(f"{self._work} ...\n" if is_new else f"{self._how_far} ({spent:.0f} s)\n")

    def _due_lines(self, stop: threading.Event, interval: float) -> Iterator[bool]:
        """Yield at each plain line, until ``stop`` is set: whether the work is new.

        ``interval``: seconds before a second line about equal work.
        """
        written, written_at = "", time.monotonic()
        while not stop.wait(min(interval, _NEW_LINE_S)):
            now, work = time.monotonic(), self._work
            if (is_new := work != written) or now - written_at >= interval:
                written, written_at = work, now
                yield is_new

    def note(self, text: str) -> None:
        """Print a line above the current work."""
        self.clear()
        self._write(f"{self._dim(' '.join(text.split()))}\n")

    def write_lines(self, text: str) -> None:
        """Print lines of text."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Remove the line and stop plain lines about slow work."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if sys.stderr.isatty():
            self._write("\r\x1b[K")

    def _dim(self, text: str) -> str:
        is_dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        return f"\x1b[2m{text}\x1b[0m" if is_dim else text

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            sys.stderr.write(text)
            sys.stderr.flush()
