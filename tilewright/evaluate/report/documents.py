"""The short tables of figures in README and docs, of the records that PERF.md has all rows of.

A document says by its markers which of them it wants; which rows they have is said here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report import display, perf_md
from tilewright.evaluate.report.markdown import find_markers
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import selection
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.row import CHANGED, OTHER_RUN, Row, machine_text, marks, origin

_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_CPUS = ("CPU", "CPU native")
_OF_DEFAULT_MODEL = ("bf16", "all-q80", "performance", "all-q40")
_SHOWN: tuple[tuple[str, str, str, selection.SpeedTable], ...] = (
    *((cpu, _DEFAULT_MODEL, name, selection.SHORT) for cpu in _CPUS for name in _OF_DEFAULT_MODEL),
    ("H200", "Llama-3.1-8B", "bf16", selection.SHORT),
    ("H200", "Llama-3.1-8B", "performance", selection.SHORT),
    ("H200", "Llama-3.1-70B", "performance", selection.SHORT),
    ("H200", "Qwen3.5-35B-A3B", "bf16", 1),
)
"""README's rows: device, model, precision, and the table that one user's speed stands in."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A configuration's figures for one user, for 32, and of its accuracy."""

    name: str
    one: Result | None
    many: Result | None
    accuracy: Result | None

    @property
    def records(self) -> list[Result]:
        return [each for each in (self.one, self.many, self.accuracy) if each is not None]


def _rate(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{display.decimal(value, 0 if value >= 100 else 1, grouped=True)} {unit}"


def _top1(row: Row) -> str:
    if row.top1_percent is None:
        return ""
    ends = display.span(row.top1_low_percent, row.top1_high_percent, joint=" to ")
    return f"{display.decimal(row.top1_percent)} ({ends})"


_COLUMNS: Mapping[str, Callable[[Row, Row], str]] = MappingProxyType(
    {
        "device": lambda one, many: one.device,
        "model": lambda one, many: one.model,
        "precision": lambda one, many: one.names,
        "weights": lambda one, many: f"{display.megabytes(one.weight_bytes)} MB",
        "top-1 (95 %)": lambda one, many: _top1(one),
        "KL": lambda one, many: display.significant(one.kl_nats, 2),
        "decode, 1 user": lambda one, many: _rate(one.decode_tokens_per_s, "t/s"),
        "TTFT": lambda one, many: _rate(one.ttft_ms, "ms"),
        "32 users, together": lambda one, many: _rate(many.all_users_tokens_per_s, "t/s"),
    }
)
_README = ("device", "model", "precision", *list(_COLUMNS)[4:5], *list(_COLUMNS)[6:])
_CPU = ("device", *tuple(_COLUMNS)[2:])


def _groups(results: Sequence[Result]) -> list[selection.Group]:
    return selection.group_results(
        [r for r in results if r.kind == "measured" and selection.is_placed(r)]
    )


def _readme(results: Sequence[Result]) -> str:
    """A row for each of `_SHOWN` that there are records of."""
    groups = _groups(results)
    lines = []
    for device, model, name, table in _SHOWN:
        for group in groups:
            if (group.any.device, group.any.model) == (device, model) and name in group.names:
                one, many = group.speed(table), group.speed(selection.BATCH_32)
                lines.append(_Line(name, one, many, group.accuracy_result))
    return _table(_README, [line for line in lines if line.records])


def _cpu(results: Sequence[Result]) -> str:
    """The default model's configurations that were measured with 32 users too, largest first, on
    each backend of the CPU.
    """
    lines = []
    for group in _groups(results):
        one, many = group.speed(selection.SHORT), group.speed(selection.BATCH_32)
        is_wanted = group.any.device in _CPUS and group.any.model == _DEFAULT_MODEL
        if is_wanted and one is not None and many is not None:
            lines.append(_Line(many.precision_name, one, many, group.accuracy_result))
    lines.sort(key=lambda line: (line.records[0].device, -(line.records[0].resident_bytes or 0)))
    return _table(_CPU, lines)


def _table(titles: Sequence[str], lines: Sequence[_Line]) -> str:
    """The rows, and below them when, where and on which code they were taken."""
    others = selection.of_other_runs([line.records for line in lines])
    rows = []
    seen = set[str]()
    for line, is_other in zip(lines, others, strict=True):
        accuracy = None if line.accuracy is None else line.accuracy.accuracy
        signs = marks(origin(line.records)["commits"], is_of_other_run=is_other)
        seen.update(signs)
        name = " ".join((line.name, *signs))
        one = Row.of(line.one, accuracy, of=line.records[0], names=[name])
        rows.append([_COLUMNS[title](one, Row.of(line.many)) for title in titles])
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
    """Each class of machine once, with all its numbers of threads or devices."""
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
    {"results": render_results, "figures": _readme, "figures-cpu": _cpu}
)
"""What is rendered between the markers of these names."""


def blocks_of(path: str) -> list[str]:
    """The blocks of a document that `update_document` renders.

    Raises:
        ConfigError: where the file cannot be read, its markers are malformed, or there are none.
    """
    names = [name for name in find_markers(perf_md.load(path).text, file=path) if name in BLOCKS]
    if not names:
        raise ConfigError(f"{path}: has no block to render; {allowed(BLOCKS)}")
    return names


def update_document(path: str, results: Sequence[Result]) -> None:
    """Render each block of a document anew. Raises ConfigError as `blocks_of`, and where the file
    cannot be written.
    """
    for name in blocks_of(path):
        perf_md.update(path, name, BLOCKS[name](results))
