"""``tilewright sweep status``, ``cancel``, ``restart`` and ``log``: show and control a sweep.

Runs no cell. A running sweep, or the next run with the file, executes the commands.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tilewright.cli.sweep import tables
from tilewright.cli.sweep.files import open_sweep, torn_lines_said
from tilewright.cli.sweep.layout import Listing
from tilewright.errors import ConfigError, one_line
from tilewright.evaluate.report.display import plain_line, plain_text
from tilewright.evaluate.sweep import estimate
from tilewright.evaluate.sweep.journal import FAILURES, SweepJournal, TrialCommand, TrialState
from tilewright.utils.files import open_regular

What = Literal["cancel", "restart"]

_MAX_LOG_BYTES = 1 << 24


def status(given: argparse.Namespace) -> int:
    """Print a sweep's progress as a table or JSON. Return the exit code."""
    journal = open_sweep(given.file)
    has_runner = journal.has_runner()
    table = _table(given, journal, has_runner=has_runner)
    if given.json:
        print(json.dumps(_values(table, journal, has_runner=has_runner), allow_nan=False))
    elif given.markdown:
        print(table.markdown(), end="")
    else:
        print("\n".join(tables.headline(journal, has_runner=has_runner)), end="\n\n")
        print("\n".join(table_lines(table, _room())))
    return 0


def _table(given: argparse.Namespace, journal: SweepJournal, *, has_runner: bool) -> Listing:
    make = tables.configurations
    if given.cells:
        make = tables.cells
    elif given.pareto:
        make = tables.front_table
    table = make(journal.state, has_runner=has_runner)
    return table.sorted_by(given.sort, is_reversed=given.reverse)


def _values(table: Listing, journal: SweepJournal, *, has_runner: bool) -> dict[str, Any]:
    state = journal.state
    statuses = [tables.shown_status(each, has_runner=has_runner) for each in state.cells.values()]
    return {
        "plan": state.planned.plan,
        "is_running": has_runner,
        "num_cells": len(statuses),
        "statuses": {each: statuses.count(each) for each in dict.fromkeys(statuses)},
        "estimated_seconds_left": round(estimate.remaining_seconds(state), 1),
        "rows": [
            {column.key: line.values[column.key] for column in table.columns}
            for line in table.lines
        ],
        "notes": list(table.notes),
    }


def _room() -> int | None:
    """Return the terminal width. None: output to a file or a pipe has no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(table: Listing, room: int | None = None) -> list[str]:
    """Return the table as lines of text, with its notes at the end."""
    widths = table.widths(room)
    pairs = list(zip(table.columns, widths, strict=True))
    found = [" ".join(c.fit(c.title, w) for c, w in pairs), " ".join("-" * w for w in widths)]
    for line in table.lines:
        found.append(" ".join(column.fit(column.show(line), width) for column, width in pairs))
    notes = ["", *table.notes] if table.notes else []
    return [line.rstrip() for line in found + notes]


def cancel(given: argparse.Namespace) -> int:
    """Request the cell cancellation. Return the exit code."""
    return _steer("cancel", given, is_failed=False)


def restart(given: argparse.Namespace) -> int:
    """Request another run of cells. Return the exit code."""
    return _steer("restart", given, is_failed=given.failed)


def _steer(what: What, given: argparse.Namespace, *, is_failed: bool) -> int:
    if bool(given.cells) is is_failed:
        which = "CELL..., or --failed" if what == "restart" else "CELL..."
        raise ConfigError(f"sweep {what}: {'both' if is_failed else 'no cell'}; allowed: {which}")
    journal = open_sweep(given.file)
    found = {
        each.cell.id: each
        for argument in given.cells
        for each in tables.find_cells(journal.state, argument)
    }
    if is_failed:
        found = {key: s for key, s in journal.state.cells.items() if s.status in FAILURES}
    with torn_lines_said():
        print("\n".join(ask(journal, list(found.values()), what)))
    return 0


def affected(states: Sequence[TrialState], what: What) -> list[TrialState]:
    """Return the cells for a command: open cells for cancel, finished cells for restart."""
    return [s for s in states if (s.is_open and not s.is_cancel_requested) is (what == "cancel")]


def ask(journal: SweepJournal, states: Sequence[TrialState], what: What) -> list[str]:
    """Request cancellation or another run of cells. Return lines about the result.

    Raises:
        ConfigError: if the sweep's file is not writable.
    """
    chosen = affected(states, what)
    left = len(states) - len(chosen)
    why = "ended, or cancelled, already" if what == "cancel" else "to be run, already"
    if not chosen:
        reason = f"{cells_text(left)} {why}" if left else "no cell has failed"
        return [f"nothing to {what}: {reason}"]
    was_running = any(each.status == "running" for each in chosen)
    names = [f"  {tables.describe(each)}" for each in chosen]
    has_runner = journal.has_runner()
    journal.append(*(TrialCommand(each.cell.id, what) for each in chosen))
    found = f"requested: {what} {cells_text(len(chosen))}"
    if what == "restart":
        taken = "the running sweep" if has_runner else "the next run of the sweep"
        found += f"; {taken} takes {'it' if len(chosen) == 1 else 'them'} up"
    elif was_running:
        found += "; the running sweep stops it" if has_runner else "; it does not run now"
    return [f"{found} ({cells_text(left)} {why})" if left else found, *names]


def cells_text(count: int) -> str:
    """Return a cell count in words: ``1 cell``, ``2 cells``."""
    return "1 cell" if count == 1 else f"{count} cells"


def log(given: argparse.Namespace) -> int:
    """Print a cell's log. Return the exit code."""
    journal = open_sweep(given.file)
    state = newest(tables.find_cells(journal.state, given.cell))
    print(log_text(journal, state, has_runner=journal.has_runner()))
    return 0


def newest(states: Sequence[TrialState]) -> TrialState:
    """Return the cell with the latest start, or the first cell if none has started."""
    return max(states, key=lambda each: each.started or "")


def log_text(
    journal: SweepJournal, state: TrialState, *, has_runner: bool, max_bytes: int = _MAX_LOG_BYTES
) -> str:
    """Return a cell's title, its outcome, and the last ``max_bytes`` of its log."""
    status = tables.shown_status(state, has_runner=has_runner)
    took = "" if state.seconds is None else f" after {state.seconds:.1f} s"
    since = f" since {plain_line(state.started)}" if status == "running" and state.started else ""
    reason = f": {plain_line(state.reason)}" if state.reason else ""
    took = "" if state.is_open else took
    head = [tables.describe(state), f"{status}{since}{took}{reason}", ""]
    return "\n".join([*head, _read_log(journal.log_path(state.cell.id), max_bytes)])


def _read_log(path: Path, max_bytes: int) -> str:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return f"no log: there is no {path}"
    except OSError as error:
        return f"no log: {path}: {one_line(error)}"
    cut = f"(the last {max_bytes} of {size} bytes of {path})\n" if size > max_bytes else ""
    return cut + (plain_text(text).rstrip("\n") or "(the log is empty)")
