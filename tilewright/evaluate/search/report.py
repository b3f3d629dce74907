"""Report of a search: a table, remarks, and a comparison with uniform configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.evaluate.report.display import decimal, megabytes, span
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results import stats
from tilewright.evaluate.results.record import Accuracy
from tilewright.evaluate.results.row import KL, TOP1, ResultRow
from tilewright.evaluate.sweep.cost_model import CostModel
from tilewright.evaluate.sweep.summary import SweptRow, common_rounds
from tilewright.evaluate.sweep.trial import Trial

Shown = tuple[SweptRow, Accuracy | None, bool]
"""A row, its accuracy on the held-out text, and whether it is within the bounds."""

COLUMNS: Columns[Shown] = {
    "configuration": lambda shown: shown[0].name,
    TOP1.lower(): lambda shown: decimal(shown[0].figures().top1_percent),
    KL: lambda shown: f"{shown[0].accuracy.kl_mean or 0:.2e}" if shown[0].accuracy else "",
    f"held-out {TOP1.lower()}": lambda shown: decimal(ResultRow.of(accuracy=shown[1]).top1_percent),
    "t/s/u": lambda shown: decimal(shown[0].speed),
    "MB": lambda shown: megabytes(shown[0].num_bytes or 0),
    "within bounds": lambda shown: "yes" if shown[2] else "no",
}


@dataclass(slots=True)
class SearchResult:
    """A search's rows, remarks, and the winner's YAML and cell. None: no winner."""

    shown: list[Shown] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    yaml: str | None = None
    cell: Trial | None = None

    def table(self) -> Table:
        """Return the table of the search's rows."""
        return Table.by(COLUMNS, self.shown)


def top1_text(accuracy: Accuracy) -> str:
    """Top-1 with its 95 % interval and count."""
    row = ResultRow.of(accuracy=accuracy)
    interval = span(row.top1_low_percent, row.top1_high_percent, joint=" to ")
    return f"{decimal(row.top1_percent)} % ({interval}, {row.positions} positions)"


def kl_text(accuracy: Accuracy) -> str:
    """KL with its standard error."""
    error = "" if accuracy.kl_error is None else f" +- {accuracy.kl_error:.1e}"
    return f"{accuracy.kl_mean or 0:.2e}{error}"


def about_predictions(model: CostModel) -> str:
    """Return the cost model's median error in the search."""
    error = model.median_error
    off = "unknown" if error is None else f"{100 * error:.1f} % (median, each left out in turn)"
    return f"The search was guided by predicted times; the cost model was off by {off}."


def against(winner: SweptRow, others: Sequence[SweptRow]) -> list[str]:
    """Return a line per uniform configuration within the bounds: relative speed and bytes."""
    lines = [
        f"Beside {row.name}: {_faster(winner, row)}, {_smaller(winner, row)}." for row in others
    ]
    return lines or ["No uniform configuration is within the bounds."]


def is_better(row: SweptRow, winner: SweptRow) -> bool:
    """Whether a row is clearly faster and no larger, or smaller and not clearly slower."""
    found = _speed_ratio(row, winner)
    if found is None:
        return False
    ours, theirs = row.num_bytes or 0, winner.num_bytes or 0
    is_faster = found.differs and found.ratio > 1
    is_slower = found.differs and found.ratio < 1
    return (is_faster and ours <= theirs) or (ours < theirs and not is_slower)


def _speed_ratio(one: SweptRow, other: SweptRow) -> stats.Ratio | None:
    numbers = common_rounds([one, other])
    if not numbers:
        return None
    return stats.paired_ratio(
        [one.by_round[number] for number in numbers],
        [other.by_round[number] for number in numbers],
    )


def _faster(winner: SweptRow, other: SweptRow) -> str:
    found = _speed_ratio(winner, other)
    if found is None:
        return "no round in which both were timed"
    if found.interval is None:
        return f"{found.ratio:.2f} times its speed ({found.num_rounds} rounds, no interval)"
    doubt = "" if found.differs else ", not distinguishable"
    interval = span(*found.interval, digits=2, joint=" to ")
    return f"{found.ratio:.2f} times its speed ({interval}, {found.num_rounds} rounds{doubt})"


def _smaller(winner: SweptRow, other: SweptRow) -> str:
    ours, theirs = megabytes(winner.num_bytes or 0), megabytes(other.num_bytes or 0)
    return f"{ours} MB of weights instead of {theirs}"
