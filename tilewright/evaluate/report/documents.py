"""Short tables in README and docs, from the records in PERF.md.

A document selects tables by markers. This module selects the rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.evaluate.report import display
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import selection
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.row import (
    CHANGED,
    OTHER_RUN,
    ResultRow,
    machine_text,
    marks,
    origin,
)
from tilewright.evaluate.store import select

_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_CPU_DEVICES = ("CPU", "CPU native")
_README_DEVICES = ("CPU native",)
_README_PRECISIONS = ("bf16", "all-q80", "performance", "all-q40")
"""Rows in README: configurations of the default model on a single device."""


@dataclass(frozen=True, slots=True)
class _DocumentLine:
    """Results for a configuration: speed with one user and with 32, and accuracy."""

    name: str
    one: Result | None
    many: Result | None
    accuracy: Result | None

    @property
    def records(self) -> list[Result]:
        return [each for each in (self.one, self.many, self.accuracy) if each is not None]


def _rate(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{display.decimal(value, 0 if value >= 100 else 1, grouped=True)} {unit}".rstrip()


def _top1(row: ResultRow) -> str:
    if row.top1_percent is None:
        return ""
    ends = display.span(row.top1_low_percent, row.top1_high_percent, joint=" to ")
    return f"{display.decimal(row.top1_percent)} ({ends})"


_COLUMNS: Mapping[str, Callable[[ResultRow, ResultRow], str]] = MappingProxyType(
    {
        "device": lambda one, many: one.device,
        "precision": lambda one, many: one.names,
        "weights": lambda one, many: f"{display.megabytes(one.weight_bytes)} MB",
        "top-1 (95 %)": lambda one, many: _top1(one),
        "KL": lambda one, many: display.significant(one.kl_nats, 2),
        "decode, 1 user": lambda one, many: _rate(one.decode_tokens_per_s, "t/s"),
        "TTFT": lambda one, many: _rate(one.ttft_ms, "ms"),
        "32 users, together": lambda one, many: _rate(many.all_users_tokens_per_s, "t/s"),
        "size (GB)": lambda one, many: display.decimal((one.weight_bytes or 0) / 1e9, 2),
        "top-1 (%, 95 % interval)": lambda one, many: _top1(one),
        "KL (nats)": lambda one, many: display.significant(one.kl_nats, 2),
        "decode (tokens/s)": lambda one, many: _rate(one.decode_tokens_per_s),
    }
)
_CPU = (
    *("device", "precision", "weights", "top-1 (95 %)", "KL"),
    *("decode, 1 user", "TTFT", "32 users, together"),
)
_README = (
    *("precision", "size (GB)", "top-1 (%, 95 % interval)", "KL (nats)"),
    "decode (tokens/s)",
)


def _groups(results: Sequence[Result], devices: Sequence[str]) -> list[selection.ResultGroup]:
    """Return the default model's groups on some devices."""
    allowed = {"model": (_DEFAULT_MODEL,), "device": devices, "kind": ("measured",)}
    selected = select(results, calibration=("",), **allowed)
    placed = list(filter(selection.is_placed, selected))
    # Results from a different machine have a different device name.
    return [g for g in selection.group_results(placed) if g.any.device in devices]


def _readme(results: Sequence[Result]) -> str:
    """Return a row for every entry in `_README_PRECISIONS` with a record."""
    lines = []
    groups = _groups(results, _README_DEVICES)
    for name in _README_PRECISIONS:
        for group in groups:
            if name in group.names:
                one = group.speed(selection.SHORT)
                lines.append(_DocumentLine(name, one, None, group.accuracy_result))
    return _table(_README, [line for line in lines if line.records], has_marks=False)


def _cpu(results: Sequence[Result]) -> str:
    """Return the default model's configurations with records for 32 users.

    Rows are ordered by CPU backend, then by size, largest first.
    """
    lines = []
    for group in _groups(results, _CPU_DEVICES):
        one, many = group.speed(selection.SHORT), group.speed(selection.BATCH_32)
        if one is not None and many is not None:
            lines.append(_DocumentLine(many.precision_name, one, many, group.accuracy_result))
    lines.sort(key=lambda line: (line.records[0].device, -(line.records[0].resident_bytes or 0)))
    return _table(_CPU, lines)


def _table(titles: Sequence[str], lines: Sequence[_DocumentLine], *, has_marks: bool = True) -> str:
    """Return the rows, and a caption with machine, dates and commits.

    ``has_marks``: mark rows from a different run or changed code, and explain the marks.
    """
    others = selection.of_other_runs([line.records for line in lines])
    rows = []
    seen = set[str]()
    for line, is_other in zip(lines, others, strict=True):
        accuracy = None if line.accuracy is None else line.accuracy.accuracy
        commits = origin(line.records)["commits"]
        signs = marks(commits, is_of_other_run=is_other) if has_marks else ()
        seen.update(signs)
        name = " ".join((line.name, *signs))
        one = ResultRow.of(line.one, accuracy, of=line.records[0], names=[name])
        rows.append([_COLUMNS[title](one, ResultRow.of(line.many)) for title in titles])
    records = [each for line in lines for each in line.records]
    said = []
    for device in dict.fromkeys(each.device for each in records):
        own = [each for each in records if each.device == device]
        taken = origin(own)
        dates, commits = (taken[name].replace("; ", ", ") for name in ("dates", "commits"))
        said.append(f"{device}: {_machines(own)} ({dates}; commit {commits}).")
    said += [f"{sign}: {meaning}." for sign, meaning in _SIGNS.items() if sign in seen]
    return f"{Table.of(titles, rows).markdown()}\n{textwrap.fill(' '.join(said), 100)}\n"


def _machines(results: Sequence[Result]) -> str:
    """Return every machine class once, with all its thread or device counts."""
    counts: dict[str, dict[str, None]] = {}
    for result in results:
        machine, _, count = machine_text(result).rpartition(", ")
        counts.setdefault(machine, {})[count] = None
    return ", ".join(
        ", ".join(filter(None, (machine, " and ".join(found)))) for machine, found in counts.items()
    )


_SIGNS = {
    OTHER_RUN: "not all of one run with the device's other rows",
    CHANGED: "on a commit with changes beside it",
}

BLOCKS: Mapping[str, Callable[[Sequence[Result]], str]] = MappingProxyType(
    {"results": render_results, "configurations": _readme, "configurations-cpu": _cpu}
)
"""Renderers by marker name."""
