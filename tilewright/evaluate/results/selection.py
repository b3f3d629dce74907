"""Selection of current results, and their assignment to tables.

Excludes table layout.
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

# An oracle and a test double have no meaningful speed, and the oracle's accuracy is 100 %.
UNPRINTED_TARGETS = ("reference", "null")

SHORT, BATCH_32 = "short", "batch_32"
SpeedTable = str | int | tuple[int, int]
"""A table for a speed: `SHORT`, one user with a short prompt; `BATCH_32`; K, the long-context table
for K * 1,024 tokens; or (users, prompt tokens) in the table for several users.
"""


@dataclass(frozen=True, slots=True)
class ResultGroup:
    """All current results for a model, a device and an effective configuration."""

    results: tuple[Result, ...]

    @property
    def any(self) -> Result:
        """A result from the group, to read common fields."""
        return self.results[0]

    @property
    def names(self) -> list[str]:
        """Sorted names of the group's configurations."""
        return sorted({result.precision_name for result in self.results})

    @property
    def heading(self) -> str:
        """Heading of the group's section: the heading for its first name."""
        return next(r.heading for r in self.results if r.precision_name == self.names[0])

    @property
    def accuracy(self) -> Accuracy | None:
        """The latest accuracy. None: not measured."""
        return self.accuracy_result.accuracy if self.accuracy_result else None

    @property
    def accuracy_result(self) -> Result | None:
        """The latest record with an accuracy. None: no record."""
        return _newest(r for r in self.results if _has_accuracy(r))

    def speed(self, table: SpeedTable) -> Result | None:
        """Return the latest result with a speed for a table, or None."""
        return _newest(result for result in self.results if speed_table(result) == table)


def context_lengths(groups: Iterable[ResultGroup]) -> list[int]:
    """Return K for every long-context table with results, ascending."""
    return sorted(table for table in _tables(groups) if isinstance(table, int))


def several_users(groups: Iterable[ResultGroup]) -> list[tuple[int, int]]:
    """Return user counts without their own table, with prompt lengths. Shorter prompts come
    first.
    """
    tables = (table for table in _tables(groups) if isinstance(table, tuple))
    return sorted(tables, key=lambda table: (table[1], table[0]))


def _tables(groups: Iterable[ResultGroup]) -> set[SpeedTable | None]:
    return {speed_table(result) for group in groups for result in group.results}


def unplaced(results: Iterable[Result]) -> list[Result]:
    """Return the results that fit no table by target, arithmetic, batch or lengths."""
    return [result for result in results if not is_placed(result)]


def group_results(results: list[Result]) -> list[ResultGroup]:
    """Return current results by effective configuration, in row order."""
    found: dict[tuple[object, ...], list[Result]] = {}
    for result in _current(distinct(results)):
        found.setdefault((*_place(result), result.effective_id), []).append(result)
    return sorted((ResultGroup(tuple(members)) for members in found.values()), key=row_order)


def distinct(results: list[Result]) -> list[Result]:
    """Return the results with separate device names for different machines or thread counts.

    For example ``CPU [a processor, 1 threads]``. The bare device name belongs to the machine with
    the most rows, then to the latest. Accuracies do not depend on the machine and keep the name.
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
    """Return rows for a table, each from a group, the record of its speed and the record of its
    accuracy.
    """
    taken = [[each for each in line[1:] if each is not None] for line in figures]
    rows = []
    for (group, speed, of_accuracy), results in zip(figures, taken, strict=True):
        accuracy = None if of_accuracy is None else of_accuracy.accuracy
        rows.append(ResultRow.of(speed, accuracy, of=group.any, names=group.names, taken=results))
    others = of_other_runs(taken)
    return [replace(row, is_of_other_run=it) for row, it in zip(rows, others, strict=True)]


def of_other_runs(rows: Sequence[Sequence[Result]]) -> list[bool]:
    """Return for every row whether a record is from a different run than most rows for the same
    device.

    A run has one code version and machine, and pauses of at most an hour. With equal row counts,
    the later run is the main run.
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
    """Return the text that distinguishes a machine from the default machine."""
    host = "" if result.host == home[0] else f", host {result.host[:6]}"
    text = f"{result.device_detail}{host}".translate(str.maketrans("()|", "   "))
    return " ".join(text.split()).strip(", ") or "elsewhere"


def _current(results: list[Result]) -> list[Result]:
    """Remove superseded results.

    A newer measurement of the same case supersedes a result. So does a newer checkpoint or
    configuration with the same name, because results for the old meaning would mix with the new.
    The same holds for a target that changes a configuration's effective settings.
    """
    results = _keep(results, _checkpoint_name, lambda r: r.model_hash)
    results = _keep(results, _configuration, lambda r: (r.precision_id, r.effective_id))
    results = _keep(results, lambda r: (*_place(r), r.precision_id), lambda r: r.effective_id)
    return _keep(results, _measurement, id)


def _keep(
    results: list[Result], place: Callable[[Result], object], identity: Callable[[Result], object]
) -> list[Result]:
    """Keep results with the same identity as the latest result at their place."""
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
    return r.model, r.weights, r.device, r.target, r.mesh, r.dp, r.calibration


def row_order(group: ResultGroup) -> tuple[object, ...]:
    """Return the sort key for rows: models by name, with random weights last."""
    r = group.any
    return (
        r.weights == "random",
        r.model,
        r.device,
        r.target,
        r.mesh,
        r.dp,
        group.names,
        r.calibration,
    )


def _newest(results: Iterable[Result]) -> Result | None:
    """Return the latest result, or the last written if times are equal."""
    return max(reversed(list(results)), key=lambda result: result.when, default=None)


def is_placed(result: Result) -> bool:
    """Return whether a result belongs to a table."""
    if result.target in UNPRINTED_TARGETS or result.compute != "fast":
        return False
    return speed_table(result) is not None or _has_accuracy(result)


def _has_accuracy(result: Result) -> bool:
    """Return whether a result has an accuracy for tables, which use a single text."""
    accuracy = result.accuracy
    return accuracy is not None and accuracy.text == ACCURACY_TEXT and result.batch == 1


def is_board(result: Result) -> bool:
    """Return whether a result is emulated or predicted for an unavailable board."""
    return result.target in BOARDS and result.kind in ("emulated", "predicted")


def speed_table(result: Result) -> SpeedTable | None:
    """Return the table for a result's speed, by batch and lengths.

    None: no table fits, or tokens were sampled, because sampling takes additional time.
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
