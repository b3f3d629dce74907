"""Which results count, and which table they belong to: current ones, by what they come to.

Knows nothing of how a table looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tilewright.compiler.devices import BOARDS
from tilewright.evaluate.cases.cases import (
    ACCURACY_TEXT,
    TABLE_GENERATED_TOKENS,
    TABLE_PROMPT_LENGTH,
)
from tilewright.evaluate.results.record import Accuracy, Result
from tilewright.evaluate.results.row import ResultRow

# An oracle and a test double make no claim of speed, and the oracle's accuracy is 100 % by nature.
UNPRINTED_TARGETS = ("reference", "null")

SHORT, BATCH_32 = "short", "batch_32"
SpeedTable = str | int | tuple[int, int]
"""A table that a speed may stand in: `SHORT`, one user with a short prompt, as in the Performance
and Accuracy tables; `BATCH_32`; K, the long-context table of K * 1,024 tokens; or, in the one of
several users, the rows of so many with prompts of so many tokens."""


@dataclass(frozen=True, slots=True)
class ResultGroup:
    """All current results of one model on one device whose configurations come to the same."""

    results: tuple[Result, ...]

    @property
    def any(self) -> Result:
        """One result of the group, to read what all of them share."""
        return self.results[0]

    @property
    def names(self) -> list[str]:
        """The names of the group's configurations, sorted."""
        return sorted({result.precision_name for result in self.results})

    @property
    def heading(self) -> str:
        """The heading of the section that the group is printed in: that of its first name."""
        return next(r.heading for r in self.results if r.precision_name == self.names[0])

    @property
    def accuracy(self) -> Accuracy | None:
        """The accuracy measured last; None where none was measured."""
        return self.accuracy_result.accuracy if self.accuracy_result else None

    @property
    def accuracy_result(self) -> Result | None:
        """The newest record of this group that measured accuracy; None: there is none."""
        return _newest(r for r in self.results if _has_accuracy(r))

    def speed(self, table: SpeedTable) -> Result | None:
        """The newest result whose speed is one of a table."""
        return _newest(result for result in self.results if speed_table(result) == table)


def context_lengths(groups: Iterable[ResultGroup]) -> list[int]:
    """The K of every long-context table that the groups have results for, ascending."""
    return sorted(table for table in _tables(groups) if isinstance(table, int))


def several_users(groups: Iterable[ResultGroup]) -> list[tuple[int, int]]:
    """The numbers of users, other than those that have tables of their own, and the lengths of
    prompts that the groups have results for: shorter prompts first.
    """
    tables = (table for table in _tables(groups) if isinstance(table, tuple))
    return sorted(tables, key=lambda table: (table[1], table[0]))


def _tables(groups: Iterable[ResultGroup]) -> set[SpeedTable | None]:
    return {speed_table(result) for group in groups for result in group.results}


def unplaced(results: Iterable[Result]) -> list[Result]:
    """The results that fit no table by their target, arithmetic, batch or lengths."""
    return [result for result in results if not is_placed(result)]


def group_results(results: list[Result]) -> list[ResultGroup]:
    """Current results by what they come to, in the order of rows; see `told_apart`."""
    found: dict[tuple[object, ...], list[Result]] = {}
    for result in _current(told_apart(results)):
        found.setdefault((*_place(result), result.effective_id), []).append(result)
    return sorted((ResultGroup(tuple(members)) for members in found.values()), key=row_order)


def told_apart(results: list[Result]) -> list[Result]:
    """The results, where those timed on another machine, or with other threads, are of a device of
    their own: ``CPU [a processor, 1 threads]``. So no foreign figure takes the place of another.

    The machine that a device's bare name stands for is the one with the most rows of it; of several
    the one measured last. Accuracies are the same on all of them, and stay.
    """
    rows: dict[tuple[str, str], dict[_Machine, set[object]]] = {}
    last: dict[_Machine, datetime] = {}
    timed = [r for r in results if r.kind == "measured" and speed_table(r) is not None]
    for r in timed:
        machines = rows.setdefault((r.device, r.target), {})
        machines.setdefault(_machine(r), set()).add(_row(r))
        last[_machine(r)] = max(r.when, last.get(_machine(r), r.when))
    homes = {
        device: max(machines, key=lambda machine: (len(machines[machine]), last[machine]))
        for device, machines in rows.items()
    }
    elsewhere = {id(r) for r in timed if _machine(r) != homes[r.device, r.target]}
    return [
        replace(r, device=f"{r.device} [{_machine_text(r, homes[r.device, r.target])}]")
        if id(r) in elsewhere
        else r
        for r in results
    ]


def table_rows(
    figures: Sequence[tuple[ResultGroup, Result | None, Result | None]],
) -> list[ResultRow]:
    """The rows of one table: each a group, the record of its speed and that of its accuracy."""
    taken = [[each for each in line[1:] if each is not None] for line in figures]
    rows = []
    for (group, speed, of_accuracy), results in zip(figures, taken, strict=True):
        accuracy = None if of_accuracy is None else of_accuracy.accuracy
        rows.append(ResultRow.of(speed, accuracy, of=group.any, names=group.names, taken=results))
    others = of_other_runs(taken)
    return [replace(row, is_of_other_run=it) for row, it in zip(rows, others, strict=True)]


def of_other_runs(rows: Sequence[Sequence[Result]]) -> list[bool]:
    """Tell for each row of a table whether one of its records was taken in another run than most
    rows of its device were; where two runs have equally many rows, the newer one counts.

    A run is of one code on one machine, and no measurement is more than an hour behind the last.
    """
    runs: dict[int, _Run] = {}
    last: dict[tuple[object, ...], Result] = {}
    starts: dict[tuple[object, ...], datetime] = {}
    for r in sorted((r for row in rows for r in row), key=lambda r: r.when):
        key = (r.device, r.target, r.commit, *_machine(r))
        if key not in last or r.when - last[key].when > _PAUSE:
            starts[key] = r.when
        last[key] = r
        runs[id(r)] = (r.device, r.target), starts[key], key
    counts = Counter(run for row in rows for run in {runs[id(r)] for r in row})
    homes: dict[tuple[str, str], _Run] = {}
    for run in sorted(counts, key=lambda run: (counts[run], run[1])):
        homes[run[0]] = run
    return [any(runs[id(r)] != homes[r.device, r.target] for r in row) for row in rows]


_PAUSE = timedelta(hours=1)
_Run = tuple[tuple[str, str], datetime, tuple[object, ...]]
_Machine = tuple[str, str]


def _machine(result: Result) -> _Machine:
    return result.host, result.device_detail


def _machine_text(result: Result, home: _Machine) -> str:
    """What tells a machine from the one that is meant without a word."""
    host = "" if result.host == home[0] else f", host {result.host[:6]}"
    text = f"{result.device_detail}{host}".translate(str.maketrans("()|", "   "))
    return " ".join(text.split()).strip(", ") or "elsewhere"


def _current(results: list[Result]) -> list[Result]:
    """Leave out what a newer result has replaced.

    That is a measurement of the same case again, but also every result of an older checkpoint of
    the name, or of an older definition of a configuration: such results keep their names, so they
    would stand beside, or mix with, what the name means now. The same holds for what a target made
    of a configuration before it came to make something else of it, under whatever name.
    """
    results = _keep(results, _checkpoint_name, lambda r: r.model_hash)
    results = _keep(results, _configuration, lambda r: (r.precision_id, r.effective_id))
    results = _keep(results, lambda r: (*_place(r), r.precision_id), lambda r: r.effective_id)
    return _keep(results, _measurement, id)


def _keep(
    results: list[Result], place: Callable[[Result], object], identity: Callable[[Result], object]
) -> list[Result]:
    """Keep the results whose identity is that of the newest result of their place."""
    newest: dict[object, Result] = {}
    for result in results:
        if (key := place(result)) not in newest or result.when >= newest[key].when:
            newest[key] = result
    return [r for r in results if identity(r) == identity(newest[place(r)])]


def _checkpoint_name(result: Result) -> tuple[object, ...]:
    return result.model, result.weights, result.device, result.target


def _configuration(result: Result) -> tuple[object, ...]:
    return *_place(result), result.precision_name


def _measurement(result: Result) -> tuple[object, ...]:
    text = result.accuracy.text if result.accuracy else None
    return *_row(result), result.case, text


def _row(result: Result) -> tuple[object, ...]:
    lengths = result.batch, result.prompt_length, result.num_generated
    return *_configuration(result), *lengths, result.sampling


def _place(result: Result) -> tuple[object, ...]:
    r = result
    return r.model, r.weights, r.device, r.target, r.mesh, r.dp


def row_order(group: ResultGroup) -> tuple[object, ...]:
    """The sort key of rows: models by name, those with random weights last."""
    r = group.any
    return r.weights == "random", r.model, r.device, r.target, r.mesh, r.dp, group.names


def _newest(results: Iterable[Result]) -> Result | None:
    """The latest; of equal times the one written last."""
    return max(reversed(list(results)), key=lambda result: result.when, default=None)


def is_placed(result: Result) -> bool:
    """Whether a result belongs to some table."""
    if result.target in UNPRINTED_TARGETS or result.compute != "fast":
        return False
    return speed_table(result) is not None or _has_accuracy(result)


def _has_accuracy(result: Result) -> bool:
    """Accuracies on other texts are read in the results; a table's figures are of one text."""
    accuracy = result.accuracy
    return accuracy is not None and accuracy.text == ACCURACY_TEXT and result.batch == 1


def is_board(result: Result) -> bool:
    """Whether a result is of a board that was not there: emulated or predicted."""
    return result.target in BOARDS and result.kind in ("emulated", "predicted")


def speed_table(result: Result) -> SpeedTable | None:
    """The table that a result's speed is one of, by its batch and lengths; None where there is no
    such table, and where tokens were drawn, for choosing among others takes time of its own.
    """
    has_speed = result.decode_tsu is not None or result.ttft_ms is not None
    if result.sampling or not has_speed or result.num_generated != TABLE_GENERATED_TOKENS:
        return None
    batch, length = result.batch, result.prompt_length
    if length == TABLE_PROMPT_LENGTH:
        return {1: SHORT, 32: BATCH_32}.get(batch, (batch, length))
    k, rest = divmod(length, 1024)
    if k == 0 or rest:
        return None
    return k if batch == 1 else (batch, length)
