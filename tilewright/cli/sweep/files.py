"""Opening a sweep's file for a command, where what was cut short is said."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.evaluate.report.display import plain_line
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.json_lines import TornLineWarning


@contextmanager
def torn_lines_said() -> Iterator[None]:
    """A line cut short is said in one line on standard error, not as a warning of Python's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TornLineWarning)
        yield
    for each in caught:
        print(f"tilewright: {plain_line(str(each.message))}", file=sys.stderr)


def open_sweep(path: str | Path) -> SweepJournal:
    """A sweep's file, running or finished. Raises ConfigError where it is none."""
    with torn_lines_said():
        return SweepJournal.open(Path(path))
