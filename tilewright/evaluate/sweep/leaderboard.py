"""Standings for swept rows: comparable groups, labels, and the Pareto front.

Documents, plots and screens show these standings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tilewright.evaluate.report.display import plain_line
from tilewright.evaluate.results import pareto
from tilewright.evaluate.results.pareto import ParetoRank
from tilewright.evaluate.results.stats import MIN_ROUNDS
from tilewright.evaluate.sweep import summary
from tilewright.evaluate.sweep.summary import SweptRow

_STANDINGS = {
    "front": "front",
    "tied": "not distinguishable from the front ({})",
    "dominated": "dominated by {}",
}

_LABEL_LENGTH = 40


@dataclass(frozen=True, slots=True)
class LeaderboardEntry:
    """A row with its label and its standing.

    Attributes:
        label: the name, or the first name and a count.
        placed: standing. None without speed or accuracy.
    """

    row: SweptRow
    label: str
    placed: ParetoRank | None

    @property
    def names(self) -> str:
        """All names, or a single name's label."""
        return self.label if len(self.row.names) == 1 else plain_line(self.row.name)

    @property
    def standing(self) -> str:
        """The standing in words, empty if unknown."""
        if self.placed is None:
            return ""
        return _STANDINGS[self.placed.standing].format(self.placed.dominated_by)


def place(row: SweptRow) -> tuple[str, ...]:
    """Return the key of a table's rows: model, target, device, arithmetic and result kind."""
    origin = next((result.kind for result in row.results.values()), "measured")
    cell = row.cell
    return cell.model_name, cell.model_hash, cell.target, cell.device, cell.compute, origin


def comparable(row: SweptRow) -> tuple[str, ...]:
    """Return the key of a front's points: their place, the reference, and the speed case."""
    accuracy, speed = row.accuracy, row.speed_result
    reference = ("", "") if accuracy is None else (accuracy.reference_id, accuracy.text)
    return *place(row), *reference, "" if speed is None else speed.case


def make_leaderboard(found: Sequence[SweptRow]) -> list[LeaderboardEntry]:
    """Return sweep rows with their standings. Equal rows are merged."""
    merged = [
        replace(swept, names=tuple(dict.fromkeys(swept.names)))
        for swept in summary.merge_equal(found)
    ]
    labels = _labels(merged)
    placed: dict[int, ParetoRank] = {}
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, swept in enumerate(merged):
        groups.setdefault(comparable(swept), []).append(index)
    for indices in groups.values():
        whole = [i for i in indices if merged[i].accuracy and merged[i].speed is not None]
        rows = _aligned([merged[i] for i in whole])
        points = [replace(swept, names=(labels[i],)) for i, swept in zip(whole, rows, strict=True)]
        found_points = filter(None, map(summary.point, points))
        placed |= dict(zip(whole, pareto.front(list(found_points)), strict=True))
    return [LeaderboardEntry(swept, labels[i], placed.get(i)) for i, swept in enumerate(merged)]


def by_place(found: Sequence[LeaderboardEntry]) -> list[list[LeaderboardEntry]]:
    """Return the rows for each table, in order."""
    groups: dict[tuple[str, ...], list[LeaderboardEntry]] = {}
    for each in found:
        groups.setdefault(place(each.row), []).append(each)
    return list(groups.values())


def place_name(row: SweptRow) -> str:
    """Return the title for a row's place."""
    name, _, target, device, compute, origin = place(row)
    text = f"{name} on {device} ({target})"
    if compute != "fast":
        text += f", {compute} arithmetic"
    return plain_line(text if origin == "measured" else f"{text}, {origin}")


def _aligned(found: Sequence[SweptRow]) -> list[SweptRow]:
    """Return the rows with comparable rounds: the i-th rounds of all rows ran together.

    These are the common rounds. If they are too few, these are the first rounds without a gap.
    """
    common = summary.common_rounds(found)
    if len(common) >= MIN_ROUNDS:
        return [summary.in_rounds(swept, common) for swept in found]
    every = sorted({number for swept in found for number in swept.by_round})
    return [
        summary.in_rounds(swept, list(takewhile(swept.by_round.__contains__, every)))
        for swept in found
    ]


def _labels(merged: Sequence[SweptRow]) -> list[str]:
    """Return short names. Equal names in a place get a distinguishing suffix."""
    wanted = [_short(swept) for swept in merged]
    for suffix in (lambda swept: swept.cell.precision_id, lambda swept: swept.effective_id):
        keys = [(place(swept), name) for swept, name in zip(merged, wanted, strict=True)]
        wanted = [
            f"{name} ({suffix(swept)})" if keys.count((place(swept), name)) > 1 else name
            for swept, name in zip(merged, wanted, strict=True)
        ]
    return wanted


def _short(swept: SweptRow) -> str:
    name, num_names = plain_line(swept.name), len(swept.names)
    if len(name) <= _LABEL_LENGTH or num_names == 1:
        return name
    return f"{plain_line(swept.names[0])} and {num_names - 1} equal"
