"""Updates the tables in PERF.md from recorded results. Handwritten text is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilewright.evaluate.report import markdown, perf_md
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.selection import unplaced
from tilewright.evaluate.store import read_store

_BLOCK = "results"
RECORDED = "results/cpu.jsonl"
"""Results in the repository. A user's runs are recorded in another file."""
_RECORDED_NAMES = ("cpu.jsonl", "h200.jsonl", "boards.jsonl")
"""Files in one directory, one per kind of machine. PERF.md is rendered from all of them."""


def read_beside(path: Path) -> list[Result]:
    """Return the results of the other recorded files, if ``path`` is a recorded file."""
    if path.name not in _RECORDED_NAMES:
        return []
    found = [path.with_name(name) for name in _RECORDED_NAMES if name != path.name]
    return read_store(*(each for each in found if each.exists()))


def check_file(output: str) -> None:
    """Check that `update_tables` can merge into a file, before anything is written.

    Raises:
        ConfigError: if the file cannot be read, or has a malformed table or marker.
    """
    if Path(output).exists():
        markdown.merge(perf_md.load(output).text, _BLOCK, "", file=output)


def update_tables(output: str, results: Sequence[Result]) -> str:
    """Render the tables of a file again. Return a summary of one line.

    Raises:
        ConfigError: if the file cannot be read or written, or has malformed markers.
    """
    perf_md.update(output, _BLOCK, render_results(results))
    left = unplaced(results)
    return f"{output}: {len(results) - len(left)} of {len(results)} results have a table"
