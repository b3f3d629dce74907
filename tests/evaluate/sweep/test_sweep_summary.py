"""Rows: rounds and repeats brought together, equal ones merged, the base's positions compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_cells import (
    NUM_POSITIONS,
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    failed,
    hits,
    planned,
    renamed,
    result,
    speed_result,
)
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.stats import mcnemar
from tilewright.evaluate.sweep import summary
from tilewright.evaluate.sweep.journal import Added, SweepState
from tilewright.evaluate.sweep.summary import SweptRow, merge_equal
from tilewright.evaluate.sweep.trial import Trial

Measured = tuple[Trial, Result | None]
BATCH = "performance-ci-32"


def rows(measured: Sequence[Measured], base: str | None = "id-a") -> list[SweptRow]:
    """Of cells that came to these results; None failed."""
    state = SweepState(planned(base=base))
    for of, _ in measured:
        state.apply(Added(of))
    for of, found in measured:
        state.apply(failed(of) if found is None else done(of, found))
    return summary.rows(state)


def speed(name: str, number: int, speeds: Sequence[float], **changes: object) -> Measured:
    of = cell(name, round=number, **changes)
    return of, speed_result(of, speeds)


def right(
    name: str, found: Sequence[bool], *, text: str | None = None, **changes: object
) -> Measured:
    of = accuracy_cell(name, text=text, **changes)
    return of, accuracy_result(of, found)


def test_repeats_of_all_rounds_stand_in_their_order() -> None:
    (row,) = rows([speed("a", 0, [3.0, 1.0]), speed("a", 1, [10.0, 2.0]), speed("a", 2, [5.0])])
    found = row.results["performance-ci-1"]
    assert [repeat.decode_tsu for repeat in found.repeats] == [3.0, 1.0, 10.0, 2.0, 5.0]
    assert row.speed == found.decode_tsu == 3.0
    assert found.spread == 3.0  # (10 - 1) / 3
    assert found.ttft_ms == 100.0 and found.ttft_spread == 0.0
    assert row.rounds == (2.0, 6.0, 5.0)
    assert (found.precision_name, found.precision_id) == ("a", "id-a")


@given(st.lists(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_medians_are_over_all_repeats(rounds: list[list[float]]) -> None:
    (row,) = rows([speed("a", number, speeds) for number, speeds in enumerate(rounds)])
    assert row.speed == pytest.approx(statistics.median(chain(*rounds)))
    assert row.rounds == pytest.approx([statistics.median(each) for each in rounds])
    assert row.by_round.keys() == set(range(len(rounds)))


def test_a_round_that_failed_is_a_gap() -> None:
    broken = (cell("a", round=1), None)
    (row,) = rows([speed("a", 0, [1.0]), broken, speed("a", 2, [3.0])])
    assert row.by_round == {0: 1.0, 2: 3.0}
    assert row.rounds == (1.0, 3.0)
    assert row.speed == 2.0


def test_a_row_knows_the_newest_record_of_a_case() -> None:
    first, second = speed("a", 0, [1.0]), speed("a", 1, [2.0])
    assert first[1] is not None and second[1] is not None
    early = renamed(second[1], timestamp="2026-01-01T00:00:00+02:00", host="early")
    late = renamed(first[1], timestamp="2026-01-01T00:00:00+00:00", host="late")
    (row,) = rows([(first[0], late), (second[0], early)])
    assert row.results["performance-ci-1"].host == "late"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_speed_is_read_from_the_first_case(order: tuple[int, int]) -> None:
    cases = ("performance-ci-1", BATCH)
    measured = [
        speed("a", number, [float(10 * (number + 1) + which)], case=cases[which])
        for number in (0, 1)
        for which in order
    ]
    (row,) = rows(measured)
    assert set(row.results) == set(cases)
    assert row.by_round == {0: 10.0 + order[0], 1: 20.0 + order[0]}
    assert row.speed == 15.0 + order[0]
    assert row.speed_result is row.results[cases[order[0]]]


def test_a_failed_first_cell_does_not_mix_two_cases() -> None:
    """Of 32 users, each is slower: no rounds of one case beside the median of another."""
    measured: list[Measured] = [
        (cell("a"), None),
        speed("a", 0, [5.0], case=BATCH),
        speed("a", 1, [100.0]),
        speed("a", 1, [6.0], case=BATCH),
    ]
    (row,) = rows(measured)
    assert (row.speed_case, row.speed, row.by_round) == ("performance-ci-1", 100.0, {1: 100.0})
    (row,) = rows([(cell("a", round=number), None) for number in (0, 1)] + measured[1::2])
    assert (row.speed_case, row.speed, row.by_round) == (BATCH, 5.5, {0: 5.0, 1: 6.0})


def test_merging_does_not_mix_two_cases() -> None:
    one = [(cell("a"), None), speed("a", 0, [5.0], case=BATCH)]
    other = [speed("b", 0, [100.0]), speed("b", 0, [7.0], case=BATCH)]
    for measured in ([*one, *other], [*other, *one]):
        (merged,) = merge_equal(rows(as_effective("shared", *measured)))
        found = merged.speed_result
        assert found is not None and found.case == merged.speed_case
        speeds = {"performance-ci-1": {100.0}, BATCH: {5.0, 7.0}}[found.case]
        assert {repeat.decode_tsu for repeat in found.repeats} == speeds
        assert set(merged.by_round.values()) <= speeds


def test_a_row_without_results_has_no_figures() -> None:
    (row,) = rows([(cell("a"), None), (accuracy_cell("a"), None)])
    assert row.speed is row.accuracy is row.effective_id is row.speed_result is None
    assert (row.rounds, row.num_bytes) == ((), 1000)  # as estimated
    assert summary.point(row) is None
    assert row.results == {}


def test_bytes_are_measured_where_they_can_be() -> None:
    of = cell("a")
    (row,) = rows([(of, speed_result(of, [1.0], resident_bytes=777))])
    assert row.num_bytes == 777
    (row,) = rows([(of, renamed(speed_result(of, [1.0]), resident_bytes=None))])
    assert row.num_bytes == 1000


def test_rows_stand_in_the_order_of_the_plan() -> None:
    measured = [right("b", hits(1)), right("a", hits(1)), speed("b", 0, [1.0])]
    assert [row.name for row in rows(measured)] == ["b", "a"]
    apart = [{"model_hash": "x"}, {"target": "t"}, {"device": "D"}, {"compute": "exact"}]
    measured = [speed("a", 0, [1.0]), *(speed("a", 0, [1.0], **each) for each in apart)]
    assert len(rows(measured)) == 5


def test_accuracies_stand_by_text() -> None:
    measured = [right("a", hits(1)), right("a", hits(4), text="held-out")]
    (row,) = rows(measured)
    assert {text: each.num_top1 for text, each in row.accuracies.items()} == {
        None: NUM_POSITIONS - 1,
        "held-out": NUM_POSITIONS - 4,
    }
    assert row.accuracy is row.accuracies[None]
    shown = row.results["performance-top-1"].accuracy
    assert shown is not None and shown.num_top1 == NUM_POSITIONS - 1
    (row,) = rows(measured[1:])
    assert row.accuracy is row.accuracies["held-out"] and row.results == {}


def test_rounds_that_all_have() -> None:
    found = rows(
        [
            *(speed("a", number, [float(number + 1)]) for number in (0, 1, 2, 4)),
            *(speed("b", number, [float(number + 2)]) for number in (1, 2, 3, 4)),
        ]
    )
    assert summary.common_rounds(found) == [1, 2, 4]
    assert summary.common_rounds([]) == []
    assert summary.common_rounds([*found, *rows([right("c", hits(1))])]) == []
    a, b = (summary.in_rounds(row, [1, 4]) for row in found)
    assert (a.rounds, b.rounds) == ((2.0, 5.0), (3.0, 6.0))
    assert a.speed == found[0].speed  # only what it is compared by has changed


def test_later_rounds_are_a_row_of_their_own() -> None:
    measured = [right("a", hits(2)), right("b", hits(5), text="held-out"), right("b", hits(3))]
    measured += [speed("b", number, [float(10**number)]) for number in range(4)]
    _, row = rows(measured)
    later = summary.later_rounds(row, 2)
    assert later.by_round == {2: 100.0, 3: 1000.0}
    assert later.speed == 550.0 and row.speed == 55.0
    assert later.names == row.names and later.accuracies == row.accuracies
    assert later.accuracy is not None and later.accuracy.paired is not None
    assert [repeat.decode_tsu for repeat in later.results["performance-ci-1"].repeats] == [
        100,
        1000,
    ]
    assert summary.later_rounds(row, 9).speed is None


def test_rows_that_come_to_the_same_are_one() -> None:
    found = rows(
        [
            (accuracy_cell("a"), None),
            *as_effective("shared", right("b", hits(3)), right("c", hits(3), text="held-out")),
            *as_effective("shared", speed("c", 0, [10.0, 30.0]), speed("c", 1, [40.0])),
            *as_effective("shared", speed("b", 0, [20.0]), speed("b", 2, [50.0])),
            *as_effective("other", speed("d", 0, [7.0])),
        ]
    )
    a, merged, d = merge_equal(found)
    assert (a.names, merged.names, d.names) == (("a",), ("b", "c"), ("d",))
    assert merged.name == "b, c"
    assert [repeat.decode_tsu for repeat in merged.results["performance-ci-1"].repeats] == [
        *(20.0, 50.0),
        *(10.0, 30.0, 40.0),
    ]
    assert merged.speed == 30.0
    assert merged.by_round == {0: 20.0}  # the median of 20 and 20, in the only round of both
    assert set(merged.accuracies) == {None, "held-out"}  # whichever of them has it
    assert merged.accuracy is not None and merged.num_bytes == 1000
    assert merged.cell.precision == "b" and len(merged.states) == 6
    assert merge_equal([a, merged, d]) == [a, merged, d]


def as_effective(effective: str, *measured: Measured) -> list[Measured]:
    return [
        (of, None if found is None else renamed(found, effective_id=effective))
        for of, found in measured
    ]


def test_the_first_one_s_accuracy_is_kept() -> None:
    found = rows(as_effective("shared", right("a", hits(1)), right("b", hits(2))))
    (merged,) = merge_equal(found)
    assert merged.accuracy is not None and merged.accuracy.num_top1 == NUM_POSITIONS - 1
    (merged,) = merge_equal(found[::-1])
    assert merged.accuracy is not None and merged.accuracy.num_top1 == NUM_POSITIONS - 2


def test_one_that_was_not_timed_takes_the_other_s_rounds() -> None:
    measured = [right("a", hits(1)), speed("b", 0, [3.0]), speed("b", 1, [5.0])]
    (merged,) = merge_equal(rows(as_effective("shared", *measured)))
    assert merged.by_round == {0: 3.0, 1: 5.0} and merged.speed == 4.0
    point = summary.point(merged)
    assert point is not None and point.name == "a, b"


@pytest.mark.parametrize(
    "place", [{"model_hash": "x"}, {"target": "t"}, {"device": "D"}, {"compute": "exact"}]
)
def test_equal_ids_of_two_places_stay_apart(place: dict[str, str]) -> None:
    measured = as_effective("shared", speed("a", 0, [1.0]), speed("b", 0, [2.0], **place))
    assert [row.names for row in merge_equal(rows(measured))] == [("a",), ("b",)]


def test_what_has_not_run_is_never_merged() -> None:
    found = rows([(cell("a"), None), (cell("b"), None)])
    assert merge_equal(found) == found


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
)
def test_positions_are_compared_with_the_base_s(pairs: list[tuple[bool, bool]]) -> None:
    found = rows(
        [right("a", [ours for ours, _ in pairs]), right("b", [theirs for _, theirs in pairs])]
    )
    base, other = (row.accuracy for row in found)
    assert base is not None and base.paired is None
    assert other is not None and other.paired is not None
    b, c = pairs.count((True, False)), pairs.count((False, True))
    assert (other.paired.b, other.paired.c) == (b, c)
    assert other.paired.p == mcnemar(b, c) and other.paired.base == "a"
    assert found[1].results["performance-top-1"].accuracy == other


def test_each_text_is_compared_with_its_own() -> None:
    found = rows(
        [
            *(right("a", hits(0)), right("a", hits(4), text="held-out")),
            *(right("b", hits(3)), right("b", hits(9), text="held-out")),
            right("b", hits(5), text="another"),
        ]
    )
    accuracies = found[1].accuracies
    counts = {
        text: None if each.paired is None else (each.paired.b, each.paired.c)
        for text, each in accuracies.items()
    }
    assert counts == {None: (3, 0), "held-out": (5, 0), "another": None}


def test_what_is_not_the_same_is_not_compared() -> None:
    base, (of, other) = right("a", hits(0)), right("b", hits(3))
    assert other is not None and other.accuracy is not None

    def paired(found: Result, base_id: str | None = "id-a", **place: str) -> bool:
        moved = replace(of, **place)
        accuracy = rows([base, (moved, found)], base_id)[1].accuracy
        assert accuracy is not None
        return accuracy.paired is not None

    assert paired(other)
    assert not paired(renamed(other, accuracy=replace(other.accuracy, reference_id="another")))
    assert not paired(renamed(other, accuracy=replace(other.accuracy, hits=None)))
    assert not paired(accuracy_result(of, hits(3, NUM_POSITIONS - 4)))
    assert not paired(other, base_id=None)
    assert not paired(other, base_id="id-x")
    assert paired(other, base_id="id-x id-a")  # as it resolves on each of two models
    for place in ({"model_hash": "x"}, {"target": "t"}, {"device": "D"}, {"compute": "exact"}):
        assert not paired(other, **place)


def test_a_speed_cell_is_no_accuracy() -> None:
    (row,) = rows([speed("a", 0, [1.0])])
    assert row.accuracy is None and summary.point(row) is None
    (row,) = rows([right("a", hits(1))])
    assert row.speed is None and summary.point(row) is None


def test_a_point_has_all_that_a_front_needs() -> None:
    found = [bool(number % 5) for number in range(40)]
    (row,) = rows([right("a", found), speed("a", 0, [4.0, 6.0]), speed("a", 1, [7.0])])
    point = summary.point(row)
    assert point is not None
    assert (point.name, point.speed, point.top1) == ("a", 6.0, 80.0)
    assert point.rounds == (5.0, 7.0) and point.hits == tuple(found)
    low, high = point.top1_interval or (0.0, 0.0)
    assert 60 < low < 80 < high < 95
    assert point.num_bytes == 1000


def test_an_accuracy_without_positions_is_a_point_without_them() -> None:
    of = accuracy_cell("a")
    found = accuracy_result(of, hits(4))
    assert found.accuracy is not None
    bare = renamed(found, accuracy=replace(found.accuracy, hits=None))
    (row,) = rows([(of, bare), speed("a", 0, [1.0])])
    point = summary.point(row)
    assert point is not None and point.hits == () and point.top1 == 75.0


def test_records_are_one_a_case() -> None:
    held_out = right("a", hits(9), text="held-out")
    measured = [right("a", hits(1)), held_out, speed("a", 0, [1.0]), speed("a", 1, [2.0])]
    found = [r for row in rows([*measured, speed("b", 0, [3.0])]) for r in row.results.values()]
    assert [(each.precision_name, each.case) for each in found] == [
        ("a", "performance-top-1"),
        ("a", "performance-ci-1"),
        ("b", "performance-ci-1"),
    ]
    assert [len(each.repeats) for each in found] == [0, 2, 1]


def test_a_result_without_repeats_is_no_round() -> None:
    of = cell("a")
    (row,) = rows([(of, result(of))])
    assert row.by_round == {} and row.speed is None
