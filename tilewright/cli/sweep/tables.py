"""Sweep tables: configurations, front and cells. Also resolves names to cells.

`status` prints them and `show` displays them. Reads and writes no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tilewright.cli.sweep.layout import Column, Listing, ScreenLine, shorten
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import decimal, plain_line, span
from tilewright.evaluate.results.row import ResultRow
from tilewright.evaluate.sweep import estimate
from tilewright.evaluate.sweep.journal import FAILURES, SweepJournal, SweepState, TrialState
from tilewright.evaluate.sweep.leaderboard import make_leaderboard
from tilewright.evaluate.sweep.summary import SweptRow, rows

_MAX_CASE_WIDTH = 18
_NUM_LISTED = 8
_MIN_DIGITS = 6
# A row's status: the first entry in any of its cells.
_URGENT = (*FAILURES, "interrupted", "stopping", "running", "queued", "cancelled")


def _decimal(value: float) -> str:
    return decimal(value, 1 if value < 1000 else 0)


def _nats(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.0e}"


_number = partial(Column, is_number=True)
_highest = partial(Column, highest_first=True)
_NAME = Column(key="name", title="Configuration")
_TOP1 = _highest(key="top1", title="Top-1", full="Top-1 (%)", text=decimal, is_number=True)
_KL = _number(key="kl", title="KL", full="KL (nats)", text=_nats)
_SPEED = _highest(key="speed", title="t/s/u", text=_decimal, is_number=True)
_TTFT = _number(key="ttft", title="TTFT", full="TTFT (ms)", text=_decimal)

CONFIGURATION_COLUMNS = (
    _NAME,
    Column(key="done", title="Done", full="Cells done"),
    _TOP1,
    _highest(
        key="interval", title="95 % CI", full="Top-1 95 % CI", text=lambda value: span(*value)
    ),
    _KL,
    _SPEED,
    _number(key="spread", title="Spr%", full="Spread (%)", text=_decimal),
    _TTFT,
    _number(key="mb", title="MB", full="Weights (MB)", text=partial(decimal, digits=0)),
    Column(key="front", title="Front"),
)


def shown_status(state: TrialState, *, has_runner: bool) -> str:
    """Return a cell's status. A running cell without a runner is interrupted."""
    if state.status != "running":
        return state.status
    if not has_runner:
        return "interrupted"
    return "stopping" if state.is_cancel_requested else "running"


def configurations(state: SweepState, *, has_runner: bool) -> Listing:
    """Return a line per configuration in plan order, with its standing."""
    found = _labelled(state)
    standings = {
        member.cell.id: each.placed.standing
        for each in make_leaderboard(found)
        if each.placed is not None
        for member in each.row.states
    }
    lines = [
        _configuration_line(row, standings.get(row.cell.id), has_runner=has_runner) for row in found
    ]
    notes = [note for row in found for each in row.states for note in _failure(row.name, each)]
    if any(row.is_emulated for row in found):
        notes.append("of boards that are not here: top-1 and KL are emulated, speed is predicted")
    return Listing(CONFIGURATION_COLUMNS, tuple(lines), tuple(notes))


def front_table(state: SweepState, *, has_runner: bool) -> Listing:
    """Return the front, with a line for equal configurations and notes on unproven differences."""
    placed = [
        (e.row, e.label, e.placed)
        for e in make_leaderboard(_labelled(state))
        if e.placed is not None
    ]
    lines, notes = [], []
    for row, label, each in placed:
        if each.standing == "front":
            lines.append(_configuration_line(row, each.standing, has_runner=has_runner))
            notes += [f"{label}: {note}" for note in each.notes]
    for _, label, each in placed:
        if each.standing == "tied":
            notes.append(f"{label}: tied with {each.dominated_by}: {'; '.join(each.notes)}")
    if not placed:
        notes.append("no configuration has both a top-1 and a speed yet")
    return Listing(CONFIGURATION_COLUMNS, tuple(lines), tuple(notes))


def cells(state: SweepState, *, has_runner: bool) -> Listing:
    """Return a line per cell, in plan order."""
    num_digits = _num_digits(list(state.cells))
    columns = (
        Column(key="cell", title="Cell", text=lambda value: value[:num_digits]),
        _NAME,
        Column(key="case", title="Case", text=_short_case),
        _number(key="round", title="Rd", full="Round"),
        Column(key="status", title="Status"),
        _number(key="seconds", title="s", full="Time (s)", text=_decimal),
        *(_TOP1, _KL, _SPEED, _TTFT),
    )
    named = [(row.name, each) for row in _labelled(state) for each in row.states]
    names = {each.cell.id: name for name, each in named}
    lines = [
        _cell_line(names[each.cell.id], each, has_runner=has_runner)
        for each in state.cells.values()
    ]
    notes = [note for name, each in named for note in _failure(name, each)]
    return Listing(columns, tuple(lines), tuple(notes))


def _short_case(value: str) -> str:
    return shorten(value.removeprefix("performance-"), _MAX_CASE_WIDTH)


def _num_digits(ids: Sequence[str]) -> int:
    """Return the shown digits per id. All shortened ids differ."""
    num_digits = _MIN_DIGITS
    while len({each[:num_digits] for each in ids}) < len(ids):
        num_digits += 1
    return num_digits


def _labelled(state: SweepState) -> list[SweptRow]:
    """Return the sweep's rows with unique names. Names contain differing places."""
    found = rows(state)
    fields = ("model_name", "target", "device", "compute")
    varying = [name for name in fields if len({getattr(row.cell, name) for row in found}) > 1]
    labels = []
    for row in found:
        place = ", ".join(str(getattr(row.cell, name)) for name in varying)
        labels.append(plain_line(f"{row.name} ({place})" if place else row.name))
    count = Counter(labels)
    return [
        replace(row, names=(label if count[label] == 1 else f"{label} #{row.cell.id[:6]}",))
        for row, label in zip(found, labels, strict=True)
    ]


def _configuration_line(row: SweptRow, standing: str | None, *, has_runner: bool) -> ScreenLine:
    figures = row.figures()  # measured bytes only, no estimates
    spread, num_bytes = figures.decode_spread_fraction, figures.weight_bytes
    values = {
        "name": row.name,
        "done": _done(row.states, has_runner=has_runner),
        **_values(figures),
        "spread": None if spread is None else 100 * spread,
        "mb": None if num_bytes is None else num_bytes / 1e6,
        "front": standing if standing in ("front", "tied") else None,
    }
    return ScreenLine(row.cell.id, row.states, values)


def _cell_line(name: str, state: TrialState, *, has_runner: bool) -> ScreenLine:
    cell, result = state.cell, state.result
    # The warm-up of an accuracy case is no speed measurement.
    timed = result if cell.kind == "speed" else None
    values = {
        "cell": cell.id,
        "name": name,
        "case": plain_line(f"{cell.case} {cell.text or ''}"),
        "round": cell.round + 1 if cell.kind == "speed" else None,
        "status": shown_status(state, has_runner=has_runner),
        "seconds": state.seconds,
        **_values(ResultRow.of(timed, None if result is None else result.accuracy)),
    }
    return ScreenLine(cell.id, (state,), values)


def _values(figures: ResultRow) -> dict[str, Any]:
    low, high = figures.top1_low_percent, figures.top1_high_percent
    return {
        "top1": figures.top1_percent,
        "interval": None if low is None else (low, high),
        "kl": figures.kl_nats,
        "speed": figures.decode_tokens_per_s,
        "ttft": figures.ttft_ms,
    }


def _done(states: Sequence[TrialState], *, has_runner: bool) -> str:
    """Return progress as ``3/4 running``: done cells, and the most urgent other status."""
    found = {shown_status(state, has_runner=has_runner) for state in states}
    word = next((each for each in _URGENT if each in found), "")
    word = "failed" if word in FAILURES else word
    num_done = sum(state.status == "done" for state in states)
    return f"{num_done}/{len(states)} {word}".strip()


def _failure(name: str, state: TrialState) -> list[str]:
    if state.status not in FAILURES:
        return []
    return [f"{describe(state, name)}: {state.status}: {plain_line(state.reason)}"]


def describe(state: TrialState, name: str = "") -> str:
    """Return a cell's short description, with its id first."""
    return plain_line(f"{state.cell.id} {state.cell.title(name)}")


def headline(journal: SweepJournal, *, has_runner: bool) -> tuple[str, str]:
    """Return two lines: the sweep's name and state, and its progress with the time left."""
    state = journal.state
    num_open = len(state.open_cells())
    how = "running" if has_runner else "not running" if num_open else "finished"
    first = f"{plain_line(journal.path.name)}: plan {plain_line(state.planned.plan)}, {how}"
    counts = Counter(shown_status(each, has_runner=has_runner) for each in state.cells.values())
    parts = [f"{counts['done']} of {len(state.cells)} cells done"]
    parts += [f"{counts[status]} {status}" for status in _URGENT if counts[status]]
    if num_open:
        parts.append(f"about {_duration(estimate.remaining_seconds(state))} left")
    return first, ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def find_cells(state: SweepState, argument: str) -> list[TrialState]:
    """Return the cells of a configuration's name, of an id, or of an id's start.

    Raises:
        ConfigError: if no cell has the name, or several ids have the start.
    """
    labelled = _labelled(state)
    for row in labelled:
        if argument == row.name:
            return list(row.states)
    found = [each for each in state.cells.values() if each.cell.is_named(argument)]
    if found:
        return found
    found = [each for key, each in state.cells.items() if argument and key.startswith(argument)]
    if len(found) == 1:
        return found
    listed = [each.cell.id for each in found] or [row.name for row in labelled]
    listed = [*listed[:_NUM_LISTED], *(["..."] if len(listed) > _NUM_LISTED else [])]
    if found:
        raise ConfigError(f"cell {argument!r}: {len(found)} ids begin so; {allowed(listed)}")
    raise ConfigError(
        f"no cell or configuration {argument[:60]!r}; {allowed(listed)}, or a cell's id "
        "(see tilewright sweep status FILE --cells)"
    )
