"""Summarizes a sweep's cells: a row per configuration with its rounds and repeats.

Knows values, not output.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.compiler.devices import BOARDS
from tilewright.evaluate.results.pareto import Point
from tilewright.evaluate.results.record import (
    Accuracy,
    Drafts,
    Paired,
    Result,
    medians,
    unpack_hits,
)
from tilewright.evaluate.results.row import ResultRow, accuracy_figures
from tilewright.evaluate.sweep.journal import SweepState, TrialState
from tilewright.evaluate.sweep.trial import Trial


@dataclass(frozen=True, slots=True)
class SweptRow:
    """All cells for a configuration on a target.

    Attributes:
        names: configurations with equal results. More than one after `merge_equal`.
        states: the cells.
        results: newest record per case, with the repeats from all rounds.
        accuracies: accuracy by text. None: the default text.
        speed_case: first planned speed case with results.
        by_round: median t/s/u per round in that case.
    """

    names: tuple[str, ...]
    states: tuple[TrialState, ...]
    results: dict[str, Result]
    accuracies: dict[str | None, Accuracy]
    speed_case: str | None
    by_round: Mapping[int, float]

    @property
    def rounds(self) -> tuple[float, ...]:
        """The speeds of `by_round` in order."""
        return tuple(speed for _, speed in sorted(self.by_round.items()))

    @property
    def cell(self) -> Trial:
        """A cell, for the common fields."""
        return self.states[0].cell

    @property
    def name(self) -> str:
        """The printed names."""
        return ", ".join(self.names)

    @property
    def accuracy(self) -> Accuracy | None:
        """The accuracy on the default text, else on the first text."""
        return self.accuracies.get(None) or next(iter(self.accuracies.values()), None)

    @property
    def speed(self) -> float | None:
        """Median t/s/u over all repeats in all rounds."""
        found = self.speed_result
        return None if found is None else found.decode_tsu

    @property
    def speed_result(self) -> Result | None:
        """The record for `rounds`."""
        return None if self.speed_case is None else self.results[self.speed_case]

    @property
    def drafts(self) -> Drafts | None:
        """The first measured acceptance of drafts, or None."""
        records = (s.result.drafts for s in self.states if s.result is not None)
        return next(filter(None, records), None)

    @property
    def measured_bytes(self) -> int | None:
        """Measured weight bytes, or None."""
        measured = (s.result.resident_bytes for s in self.states if s.result is not None)
        return next((size for size in measured if size is not None), None)

    @property
    def num_bytes(self) -> int | None:
        """Measured weight bytes, else estimated bytes."""
        measured = self.measured_bytes
        return self.cell.weight_bytes if measured is None else measured

    @property
    def is_emulated(self) -> bool:
        """Return whether the row is of an absent board: emulated accuracy, predicted speed."""
        return self.cell.target in BOARDS

    def figures(self) -> ResultRow:
        """Return a flat row, with measured bytes."""
        flat = ResultRow.of(self.speed_result, self.accuracy, names=self.names)
        return replace(flat, weight_bytes=self.measured_bytes)

    @property
    def effective_id(self) -> str | None:
        """The effective configuration's id on the target, or None before a run."""
        return next((s.result.effective_id for s in self.states if s.result is not None), None)


def rows(
    state: SweepState, precision_id: str | None = None, *, calibration: str = ""
) -> list[SweptRow]:
    """Return rows by configuration in plan order, compared with the sweep's base.

    With ``precision_id``, return the rows of this configuration and ``calibration`` only.
    """

    def is_wanted(cell: Trial) -> bool:
        wanted = precision_id, calibration
        return precision_id is None or (cell.precision_id, cell.calibration) == wanted

    grouped: dict[tuple[str, ...], list[TrialState]] = {}
    for each in state.cells.values():
        if is_wanted(each.cell) or state.planned.is_base(each.cell):
            grouped.setdefault(each.cell.configuration, []).append(each)
    found = [_row(states) for states in grouped.values()]
    bases = {row.cell.place: row for row in found if state.planned.is_base(row.cell)}
    return [_with_pairs(row, bases.get(row.cell.place)) for row in found if is_wanted(row.cell)]


def merge_equal(found: Sequence[SweptRow]) -> list[SweptRow]:
    """Merge the rows with equal effective values on their target."""
    groups: dict[object, list[SweptRow]] = {}
    for index, swept in enumerate(found):
        cell, effective = swept.cell, swept.effective_id
        drafts = "" if swept.drafts is None else cell.precision_id
        key = (*cell.place, effective, cell.calibration, drafts) if effective else index
        groups.setdefault(key, []).append(swept)
    return [_merged(members) if len(members) > 1 else members[0] for members in groups.values()]


def common_rounds(found: Sequence[SweptRow]) -> list[int]:
    """Return the rounds that all rows have in common."""
    numbers = [set(row.by_round) for row in found]
    return sorted(set.intersection(*numbers)) if numbers else []


def in_rounds(row: SweptRow, numbers: Sequence[int]) -> SweptRow:
    """Return the row with only these rounds for comparison."""
    return replace(row, by_round={number: row.by_round[number] for number in numbers})


def later_rounds(row: SweptRow, first: int) -> SweptRow:
    """Return the row without speeds before round ``first``."""
    kept = tuple(s for s in row.states if s.cell.kind == "accuracy" or s.cell.round >= first)
    alone = _row(kept)
    return replace(alone, names=row.names, accuracies=row.accuracies)


def point(row: SweptRow) -> Point | None:
    """Return a row as a point of speed and top-1, or None if one is missing."""
    accuracy, speed = row.accuracy, row.speed
    if accuracy is None or speed is None:
        return None
    hits, figures = accuracy.hits, accuracy_figures(accuracy)
    return Point(
        name=row.name,
        speed=speed,
        top1=figures["top1_percent"],
        rounds=row.rounds,
        hits=() if hits is None else unpack_hits(hits, accuracy.num_positions),
        top1_interval=(figures["top1_low_percent"], figures["top1_high_percent"]),
        num_bytes=row.num_bytes,
        speed_error=_speed_error(row),
    )


def _speed_error(row: SweptRow) -> float | None:
    """Return a predicted speed's relative error, infinite if unknown. None: measured."""
    found = row.speed_result
    if found is None or found.kind != "predicted":
        return None
    return math.inf if found.decode_error is None else found.decode_error


def _row(states: Sequence[TrialState]) -> SweptRow:
    done = [
        (state.cell, replace(state.result, precision_name=state.cell.precision))
        for state in states
        if state.result is not None
    ]
    accuracies: dict[str | None, Accuracy] = {}
    by_case: dict[str, list[Result]] = {}
    for cell, result in done:
        if cell.text is None:
            by_case.setdefault(cell.case, []).append(result)
        if result.accuracy is not None:
            accuracies[cell.text] = result.accuracy
    results = {
        case: with_repeats(max(members, key=lambda member: member.when), members)
        for case, members in by_case.items()
    }
    timed = [state.cell.case for state in states if state.cell.kind == "speed"]
    speed_case = next((case for case in timed if case in results), None)
    return SweptRow(
        names=(states[0].cell.name,),
        states=tuple(states),
        results=results,
        accuracies=accuracies,
        speed_case=speed_case,
        by_round={
            cell.round: result.decode_tsu
            for cell, result in done
            if cell.case == speed_case and result.decode_tsu is not None
        },
    )


def _merged(members: Sequence[SweptRow]) -> SweptRow:
    """Merge rows: all names, all repeats, and a median per round."""
    first = members[0]
    accuracies: dict[str | None, Accuracy] = {}
    results: dict[str, Result] = {}
    for row in reversed(members):  # the first row has precedence
        accuracies |= row.accuracies
        results |= row.results
    results = {
        case: with_repeats(each, [row.results[case] for row in members if case in row.results])
        for case, each in results.items()
    }
    speed_case = next((row.speed_case for row in members if row.speed_case), None)
    timed = [row for row in members if speed_case and row.speed_case == speed_case]
    return SweptRow(
        names=tuple(name for row in members for name in row.names),
        states=(*first.states, *(state for row in members[1:] for state in row.states)),
        results=results,
        accuracies=accuracies,
        speed_case=speed_case,
        by_round={
            number: statistics.median([row.by_round[number] for row in timed])
            for number in common_rounds(timed)
        },
    )


def with_repeats(result: Result, members: Sequence[Result]) -> Result:
    """Return a result with all members' repeats. Predictions have no repeats."""
    repeats = tuple(repeat for member in members for repeat in member.repeats)
    return replace(result, repeats=repeats, **medians(repeats)) if repeats else result


def _with_pairs(row: SweptRow, base: SweptRow | None) -> SweptRow:
    """Add McNemar's comparison with the base of the same model and target."""

    def paired(accuracy: Accuracy, text: str | None) -> Accuracy:
        theirs = None if base is None or base is row else base.accuracies.get(text)
        if theirs is None or theirs.hits is None or accuracy.hits is None:
            return accuracy
        ours_of = accuracy.reference_id, accuracy.num_positions
        if ours_of != (theirs.reference_id, theirs.num_positions):
            return accuracy
        assert base is not None
        n = accuracy.num_positions
        before, after = unpack_hits(theirs.hits, n), unpack_hits(accuracy.hits, n)
        pair = Paired.from_hits(base.names[0], theirs=before, ours=after)
        return replace(accuracy, paired=pair)

    accuracies = {text: paired(each, text) for text, each in row.accuracies.items()}
    results = {
        case: result if result.accuracy is None else replace(result, accuracy=accuracies[None])
        for case, result in row.results.items()
    }
    return replace(row, accuracies=accuracies, results=results)
