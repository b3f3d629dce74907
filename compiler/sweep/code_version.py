"""Which code a cell's figures were measured by, held against the code that runs now."""

from __future__ import annotations

from tilewright.compiler.bench.record import Result
from tilewright.compiler.environment import Environment
from tilewright.compiler.sweep.journal import CellState, SweepState

_COMMIT_DIGITS = 10


def is_of(result: Result, now: Environment) -> bool:
    """Whether a record is of this commit and these libraries; a checkout with changes of its own
    is taken for itself.
    """
    known = {name: result.versions.get(name) for name in now.versions}
    return (result.commit, known) == (now.commit, now.versions)


def cells_of_others(state: SweepState, now: Environment) -> list[CellState]:
    """The cells whose figures other code has measured, in order."""
    done = [each for each in state.cells.values() if each.result is not None]
    return [each for each in done if each.result is not None and not is_of(each.result, now)]


def difference(result: Result, now: Environment) -> str:
    """What a record's code has and this one has not: ``commit 18d3c11496, torch 2.12.0``."""
    parts = [] if result.commit == now.commit else [_commit(result.commit)]
    for name, version in now.versions.items():
        if (theirs := result.versions.get(name)) != version:
            parts.append(f"{name} {theirs or 'unknown'}")
    return ", ".join(parts)


def _commit(commit: str | None) -> str:
    head, dirty, _ = (commit or "unknown").partition("-dirty")
    return f"commit {head[:_COMMIT_DIGITS]}{dirty}"
