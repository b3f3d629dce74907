"""Progress of a batch: rows, tokens per second, and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tilewright.batch.dataset import DataSet
from tilewright.batch.engine import FinishedRequest
from tilewright.cli.terminal.console import err

_SHOW_SECONDS = 0.1


class Bar:
    """Progress of a batch: a bar if standard error is a terminal, else lines by `said`.

    Progress counts the maximum tokens of rows if they are known. The longest rows run first, so a
    count of rows would overestimate the remaining time.
    """

    def __init__(self, data: DataSet, left: Sequence[int], *, num_done: int) -> None:
        console = err()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._data, self._num_before = data, num_done
        self._num_rows = num_done + len(left)
        self._total = sum(self._work(row) for row in left)
        self._task: TaskID | None = None
        self._began = self._shown = 0.0
        self._num_ended = self._num_output = self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, ended: Sequence[FinishedRequest], num_output: int) -> None:
        """Count finished rows. The first call starts the bar."""
        now = time.monotonic()
        if self._task is None:
            self._progress.start()
            self._task, self._began = self._progress.add_task("", total=self._total), now
        self._num_output = num_output
        if ended:
            self._num_ended += len(ended)
            self._done += sum(self._work(each.record.row) for each in ended)
        if now - self._shown > _SHOW_SECONDS:
            self._shown = now
            self._progress.update(self._task, completed=self._done, description=self._counted(now))

    def said(self) -> str:
        """Return a line with the rows, both rates since the first step, and the remaining time."""
        now = time.monotonic()
        if self._task is None:
            return "the first step"
        left = (now - self._began) * (self._total - self._done) / max(self._done, 1)
        until = timedelta(seconds=round(left)) if self._done else "?"
        return f"{self._counted(now)}, {until} left"

    def _counted(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        rows = f"{self._num_before + self._num_ended:,}/{self._num_rows:,} rows"
        rates = f"{self._num_ended / seconds:,.1f} rows/s, {self._num_output / seconds:,.0f} t/s"
        return f"{rows}, {rates}"

    def _work(self, row: int) -> int:
        return max(1, self._data.length(row))
