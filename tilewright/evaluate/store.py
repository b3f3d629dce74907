"""The store of recorded results: JSON line files, a query, and the selected results.

A file has results, or a sweep's events. A sweep plans trials and its file has their results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import read
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.json_lines import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Conditions on results. An empty condition selects all results.

    Attributes:
        models: Names without the random weight mark.
        devices, targets, precisions, cases: Names.
        kinds: measured, emulated, predicted or published.
    """

    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def selects(self, result: Result) -> bool:
        """Return whether a result meets all conditions."""
        pairs = (
            (self.models, result.model),
            (self.devices, result.device),
            (self.targets, result.target),
            (self.precisions, result.precision_name),
            (self.cases, result.case),
            (self.kinds, result.kind),
        )
        return all(not allowed or value in allowed for allowed, value in pairs)

    def select(self, results: Iterable[Result]) -> list[Result]:
        """Return the selected results in their order."""
        return list(filter(self.selects, results))


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
