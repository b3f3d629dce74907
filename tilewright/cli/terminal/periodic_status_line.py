"""A status line that also writes to logs, at intervals. Imports nothing heavy."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from tilewright.cli.arguments.ask import ModelStatusLine

_SECONDS = 10.0


class PeriodicStatusLine(ModelStatusLine):
    """A status line with plain lines if there is no terminal.

    A thread writes a line with the elapsed seconds every ten seconds, and a second after new work
    begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._doing: Callable[[], str] = lambda: "starting"
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            self._thread = threading.Thread(target=self._pulse, name="pulse", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()

    def show(self, text: str) -> None:
        """Show the current work until the next call."""
        self._doing = lambda: text
        super().show(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Show a compilation's progress, at most ten times per second."""
        self._work, self._doing = what, lambda: f"{what} {100 * done // max(total, 1)} %"
        if sys.stderr.isatty():
            super().progress(what, done, total)

    def follow(self, doing: Callable[[], str]) -> None:
        """Call ``doing`` from another thread for the current work."""
        self._doing = doing

    def _pulse(self) -> None:
        began = time.monotonic()
        for _ in self._due_lines(self._has_ended, _SECONDS):
            self._write(f"{time.monotonic() - began:.0f} s: {self._doing()}\n")
