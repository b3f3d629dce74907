"""What a search shows: its table, and the winner beside the uniform configurations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    failed,
    hits,
    planned,
    speed_result,
)
from tilewright.evaluate.results.record import Accuracy
from tilewright.evaluate.search.report import (
    COLUMNS,
    SearchResult,
    about_predictions,
    against,
    is_better,
    top1_text,
)
from tilewright.evaluate.sweep import summary
from tilewright.evaluate.sweep.cost_model import CostModel
from tilewright.evaluate.sweep.journal import Added, SweepState, TrialState
from tilewright.evaluate.sweep.summary import SweptRow


def row(
    name: str, speeds: Sequence[float] = (), num_bytes: int = 10**6, wrong: int = 1
) -> SweptRow:
    """A round for every speed; those of 0 failed."""
    state = SweepState(planned())
    of = accuracy_cell(name, weight_bytes=num_bytes)
    state.apply(Added(of))
    state.apply(done(of, accuracy_result(of, hits(wrong))))
    for number, speed in enumerate(speeds):
        of = cell(name, round=number, weight_bytes=num_bytes)
        state.apply(Added(of))
        state.apply(done(of, speed_result(of, [speed])) if speed else failed(of))
    (found,) = summary.rows(state)
    return found


def cells_of(found: SweptRow) -> tuple[TrialState, ...]:
    """Before any of them has run."""
    return tuple(TrialState(state.cell) for state in found.states)


def test_the_table_has_a_line_a_configuration() -> None:
    winner = row("step-3", [50.0, 52.0, 51.0], 83_600_000, wrong=2)
    bare = SweptRow(("none",), cells_of(winner), {}, {}, None, {})
    found = SearchResult(shown=[(winner, row("x", wrong=4).accuracy, True), (bare, None, False)])
    assert [dict(zip(COLUMNS, line, strict=True)) for line in found.table().rows] == [
        {
            "configuration": "step-3",
            "top-1 (%)": "87.5",
            "KL": "1.00e-02",
            "held-out top-1 (%)": "75.0",
            "t/s/u": "51.0",
            "MB": "84",
            "within bounds": "yes",
        },
        {
            "configuration": "none",
            "top-1 (%)": "",
            "KL": "",
            "held-out top-1 (%)": "",
            "t/s/u": "",
            "MB": "84",
            "within bounds": "no",
        },
    ]
    assert SearchResult().table().rows == () and SearchResult().yaml is None


def test_uniform_configurations_within_the_bounds_are_compared() -> None:
    winner = row("step-3", [110.0, 121.0, 99.0], 80_000_000)
    others = [
        row("base", [100.0, 110.0, 90.0], 160_000_000),
        row("same", [110.0, 120.0, 100.0], 80_400_000),
    ]
    lines = against(winner, others)
    assert len(lines) == 2
    assert lines[0] == (
        "Beside base: 1.10 times its speed (1.10 to 1.10, 3 rounds), "
        "80 MB of weights instead of 160."
    )
    assert lines[1].startswith("Beside same: 1.00 times its speed (0.98 to 1.02, 3 rounds, not ")
    assert lines[1].endswith("not distinguishable), 80 MB of weights instead of 80.")


def test_too_few_rounds_have_no_interval() -> None:
    lines = against(row("a", [20.0, 30.0]), [row("b", [10.0, 15.0])])
    assert lines == [
        "Beside b: 2.00 times its speed (2 rounds, no interval), 1 MB of weights instead of 1."
    ]


def test_only_rounds_taken_together_are_compared() -> None:
    winner = row("a", [20.0, 0.0, 60.0, 80.0])
    (line,) = against(winner, [row("b", [10.0, 5.0, 0.0, 40.0])])
    assert "2.00 times its speed (2 rounds" in line


@pytest.mark.parametrize("speeds", [(), (0.0, 0.0), (0.0, 5.0)])
def test_without_a_common_round_no_speed_is_claimed(speeds: tuple[float, ...]) -> None:
    """All of its cells failed in these rounds, or it was never timed."""
    (line,) = against(row("a", [20.0, 0.0]), [row("b", speeds)])
    assert line.startswith("Beside b: ") and "1 MB of weights instead of 1." in line
    assert "times" not in line
    assert not is_better(row("b", speeds, 10), row("a", [20.0, 0.0]))


SLOW, FAST, SAME = [10.0, 11.0, 12.0], [20.0, 22.0, 24.1], [10.0, 11.1, 11.9]


@pytest.mark.parametrize(
    ("speeds", "num_bytes", "expected"),
    [
        (FAST, 10**6, True),
        (FAST, 10**6 - 1, True),
        (FAST, 10**6 + 1, False),
        (SAME, 10**6 - 1, True),
        (SAME, 10**6, False),
        (FAST[:2], 10**6, False),  # two rounds prove nothing
        (FAST[:2], 10**6 - 1, True),
        ([5.0, 5.5, 6.01], 10**6 - 1, False),
    ],
)
def test_what_is_better_than_the_winner(
    speeds: list[float], num_bytes: int, expected: bool
) -> None:
    """Clearly faster and no larger, or smaller and not clearly slower."""
    assert is_better(row("b", speeds, num_bytes), row("a", SLOW)) is expected


def test_where_no_uniform_configuration_is_within_the_bounds() -> None:
    expected = ["No uniform configuration is within the bounds."]
    assert against(row("a", [1.0]), []) == expected


def test_what_predictions_are_worth_is_said() -> None:
    known = CostModel(1.0, {}, {"a": -0.021, "b": 0.034, "c": None, "d": 0.5})
    assert "off by 3.4 % (median, each left out in turn)" in about_predictions(known)
    assert "off by unknown" in about_predictions(CostModel(1.0, {}, {"a": None}))
    assert "predicted times" in about_predictions(known)


def test_top_1_in_words() -> None:
    found = Accuracy.from_counts("reference", num_positions=512, num_top1=487, num_top5=500)
    low, high = found.top1_interval
    assert top1_text(found) == f"95.1 % ({100 * low:.1f} to {100 * high:.1f}, 512 positions)"
