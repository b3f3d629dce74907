"""Opens a sweep's file for a command. Reports truncated lines."""

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
    """Report a truncated line on standard error instead of by a Python warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TornLineWarning)
        yield
    for each in caught:
        print(f"tilewright: {plain_line(str(each.message))}", file=sys.stderr)


def open_sweep(path: str | Path) -> SweepJournal:
    """Open the file of a running or finished sweep. Raise ConfigError for another file."""
    with torn_lines_said():
        return SweepJournal.open(Path(path))
