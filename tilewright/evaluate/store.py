"""The store of recorded results: JSON line files, and a selection by fields.

A file has results, or a sweep's events. A sweep plans trials and its file has their results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import read
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.json_lines import read_lines


def select(results: Iterable[Result], **allowed: Collection[str]) -> list[Result]:
    """Return the results whose fields have one of the ``allowed`` values. Empty: any value."""
    return [
        result
        for result in results
        if all(not values or getattr(result, name) in values for name, values in allowed.items())
    ]


def read_store(*paths: Path) -> list[Result]:
    """Return the results of files, in the order of the files and lines.

    Raises:
        ConfigError: for a missing file, or a malformed line.
    """
    return [result for path in paths for result in _read(path)]


def _read(path: Path) -> list[Result]:
    if not _is_sweep(path):
        return read(path)
    return [
        dataclasses.replace(state.result, precision_name=state.cell.precision)
        for state in SweepJournal.open(path).state.cells.values()
        if state.result is not None
    ]


def _is_sweep(path: Path) -> bool:
    lines = read_lines(path)
    try:
        first = json.loads(lines[0][1]) if lines else None
    except ValueError:
        return False
    return isinstance(first, dict) and "event" in first
