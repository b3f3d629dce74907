"""What came of a search: a table, remarks, the comparison with uniform configurations.

Knows measured rows; how they were found is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.compiler.bench import stats
from tilewright.compiler.bench.record import Accuracy
from tilewright.compiler.sweep.cost_model import CostModel
from tilewright.compiler.sweep.summary import Row, common_rounds

COLUMNS = (
    "configuration",
    "top-1 (%)",
    "KL",
    "held-out top-1 (%)",
    "t/s/u",
    "MB",
    "within bounds",
)


@dataclass(slots=True)
class Found:
    """What came of a search: rows for a table, remarks, and the YAML where there is a winner."""

    shown: list[tuple[Row, Accuracy | None, bool]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    yaml: str | None = None

    def table(self) -> list[tuple[str, ...]]:
        """Text for `COLUMNS`."""
        return [
            (
                row.name,
                percent(row.accuracy),
                "" if row.accuracy is None else f"{row.accuracy.kl_mean or 0:.2e}",
                percent(held_out),
                "" if row.speed is None else f"{row.speed:.1f}",
                f"{(row.num_bytes or 0) / 1e6:.0f}",
                "yes" if is_within else "no",
            )
            for row, held_out, is_within in self.shown
        ]


def percent(accuracy: Accuracy | None) -> str:
    """Top-1, or nothing where it was not measured."""
    if accuracy is None:
        return ""
    return f"{100 * accuracy.num_top1 / accuracy.num_positions:.1f}"


def top1_text(accuracy: Accuracy) -> str:
    """Top-1 with its 95 % interval and count."""
    low, high = (100 * bound for bound in accuracy.top1_interval)
    n = accuracy.num_positions
    return f"{percent(accuracy)} % ({low:.1f} to {high:.1f}, {n} positions)"


def about_predictions(model: CostModel) -> str:
    """How far the cost model that guided the search was off where that could be told."""
    error = model.median_error
    off = "unknown" if error is None else f"{100 * error:.1f} % (median, each left out in turn)"
    return f"The search was guided by predicted times; the cost model was off by {off}."


def against(winner: Row, others: Sequence[Row]) -> list[str]:
    """A line for every uniform configuration within the bounds: speed and bytes beside it."""
    lines = [
        f"Beside {row.name}: {_faster(winner, row)}, {_smaller(winner, row)}." for row in others
    ]
    return lines or ["No uniform configuration is within the bounds."]


def is_better(row: Row, winner: Row) -> bool:
    """Whether a row is clearly faster and no larger, or smaller and not clearly slower."""
    found = _speed_ratio(row, winner)
    if found is None:
        return False
    ours, theirs = row.num_bytes or 0, winner.num_bytes or 0
    is_faster = found.differs and found.ratio > 1
    is_slower = found.differs and found.ratio < 1
    return (is_faster and ours <= theirs) or (ours < theirs and not is_slower)


def _speed_ratio(one: Row, other: Row) -> stats.Ratio | None:
    numbers = common_rounds([one, other])
    if not numbers:
        return None
    return stats.paired_ratio(
        [one.by_round[number] for number in numbers],
        [other.by_round[number] for number in numbers],
    )


def _faster(winner: Row, other: Row) -> str:
    found = _speed_ratio(winner, other)
    if found is None:
        return "no round in which both were timed"
    if found.interval is None:
        return f"{found.ratio:.2f} times its speed ({found.num_rounds} rounds, no interval)"
    low, high = found.interval
    doubt = "" if found.differs else ", not distinguishable"
    rounds = f"{found.num_rounds} rounds"
    return f"{found.ratio:.2f} times its speed ({low:.2f} to {high:.2f}, {rounds}{doubt})"


def _smaller(winner: Row, other: Row) -> str:
    ours, theirs = winner.num_bytes or 0, other.num_bytes or 0
    return f"{ours / 1e6:.0f} MB of weights instead of {theirs / 1e6:.0f}"
