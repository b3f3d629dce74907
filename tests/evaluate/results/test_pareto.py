"""Pareto fronts: ranks, notes, the seed's table, and properties of random points."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.evaluate.report import perf_md
from tilewright.evaluate.results.pareto import (
    Comparison,
    ParetoRank,
    Point,
    compare_speed,
    compare_top1,
    front,
)

SEED = Path(__file__).parents[2] / "goldens" / "seed_perf.md"
NUM_POSITIONS = 200
STEADY = (1.00, 1.01, 0.99, 1.00)
SHAKY = (1.3, 0.8, 1.1, 0.8)


def measured(
    name: str,
    speed: float,
    wrong: range = range(0),
    *,
    rounds: tuple[float, ...] = STEADY,
) -> Point:
    """Return a point with wrong positions. ``rounds`` are relative speeds."""
    hits = tuple(i not in wrong for i in range(NUM_POSITIONS))
    top1 = 100 * sum(hits) / NUM_POSITIONS
    return Point(name, speed, top1, tuple(speed * each for each in rounds), hits)


def predicted(name: str, speed: float, wrong: range = range(0), *, error: float = 0.17) -> Point:
    """Return a predicted point with equal rounds."""
    point = measured(name, speed, wrong, rounds=(1.0, 1.0, 1.0))
    return dataclasses.replace(point, speed_error=error)


def placed(*points: Point) -> dict[str, ParetoRank]:
    return {each.point.name: each for each in front(points)}


def standings(*points: Point) -> dict[str, str]:
    return {each.point.name: each.standing for each in front(points)}


def test_a_predicted_speed_inside_the_models_error_makes_no_front() -> None:
    """Equal rounds are no precision: the model's error is larger than the difference."""
    best, near = predicted("best", 100.0), predicted("near", 104.0, range(3))
    worse, far = predicted("worse", 105.0, range(40)), predicted("far", 118.0, range(40))
    assert standings(best, near, worse) == {"best": "front", "near": "tied", "worse": "dominated"}
    found = placed(best, near, worse, far)
    assert {name: each.standing for name, each in found.items()} == {
        **{"best": "front", "near": "tied"},
        **{"worse": "dominated", "far": "front"},
    }
    assert found["near"].dominated_by == "best" and found["near"].notes[0] == (
        "its speed is not distinguishable from best's (ratio 1.040, the time model's error: 17 %)"
    )


def test_an_extrapolated_speed_is_known_to_differ_from_none() -> None:
    points = [predicted("best", 100.0, error=math.inf), predicted("b", 900.0, range(40), error=0.1)]
    assert standings(*points) == {"best": "front", "b": "dominated"}
    assert "the time model's error: unknown" in placed(*points)["b"].notes[0]
    assert standings(*(dataclasses.replace(p, speed_error=None) for p in points))["b"] == "front"


def test_of_points_inside_the_models_error_one_that_is_beyond_all_kept_stays() -> None:
    """The last point is clearly faster than the first, although no neighbors differ."""
    chain = [predicted(str(i), 100 * 1.1**i, range(3 * i)) for i in range(4)]
    assert standings(*chain) == {"0": "front", "1": "tied", "2": "front", "3": "tied"}


def test_the_seeds_twelve_precisions_have_two_on_their_front() -> None:
    sections = perf_md.parse(SEED.read_bytes().decode()).sections
    rows = [(s.title, row) for s in sections if s.kind == "precision" for row in s.rows]
    points = []
    for title, row in rows:
        assert row.speed is not None and row.top1 is not None
        points.append(Point(title, row.speed, row.top1))
    assert len(points) == 12
    found = front(points)
    on = [each for each in found if each.standing == "front"]
    assert {(each.point.speed, each.point.top1) for each in on} == {(101.0, 90), (99.0, 91)}
    assert [each.standing for each in found].count("dominated") == 10
    for each in found:  # unknown noise, so no proven rank
        assert each.notes and all("is not known to differ from" in note for note in each.notes)
    assert {each.dominated_by for each in found} == {None, *(each.point.name for each in on)}


def test_speeds_are_compared_round_by_round() -> None:
    found = compare_speed(measured("a", 110.0), measured("b", 100.0))
    assert found == Comparison("first", True, True, "ratio 1.100 (1.100 to 1.100), 4 rounds")
    slower = Point("a", 98.0, 50, rounds=(90.0, 98.0, 99.0))
    found = compare_speed(slower, Point("b", 99.0, 50, rounds=(99.0, 99.0, 97.0, 300.0)))
    assert found == Comparison("second", True, False, "ratio 0.972 (0.838 to 1.128), 3 rounds")


@pytest.mark.parametrize(
    "rounds, evidence",
    [((), "unknown: no rounds"), ((101.0, 99.0), "unknown: rounds: 2, needed: 3")],
)
def test_unknown_speed_noise_claims_nothing(rounds: tuple[float, ...], evidence: str) -> None:
    found = compare_speed(Point("a", 100.0, 50, rounds=rounds), measured("b", 50.0))
    assert found == Comparison("first", False, False, evidence)
    assert found.is_taken_as_real


def test_top1_is_compared_on_the_positions_that_differ() -> None:
    found = compare_top1(measured("a", 1, range(2, 5)), measured("b", 1, range(4, 16)))
    assert found == Comparison("first", True, True, "p = 0.0225, +11 -2 of 200")
    found = compare_top1(measured("a", 1, range(5)), measured("b", 1))
    assert found == Comparison("second", True, False, "p = 0.0625, +0 -5 of 200")
    assert not found.is_taken_as_real


def test_unknown_or_other_positions_claim_nothing() -> None:
    found = compare_top1(measured("a", 1), Point("b", 1, 99.0))
    assert found == Comparison("first", False, False, "unknown: no positions")
    found = compare_top1(measured("a", 1), Point("b", 1, 100.0, hits=(True,) * 9))
    assert found == Comparison(None, False, False, "unknown: 200 and 9 positions")
    assert not found.is_taken_as_real


def test_a_difference_is_claimed_only_in_the_direction_that_is_printed() -> None:
    a = Point("a", 100.0, 50, rounds=(99.0, 98.0, 99.0))
    for speed, better in ((101.0, "second"), (100.0, None)):
        found = compare_speed(a, Point("b", speed, 50, rounds=(90.0, 89.0, 90.0)))
        assert (found.better, found.is_known, found.is_distinguishable) == (better, True, False)
        assert "estimates" in found.evidence


def test_dominated_needs_one_clear_loss() -> None:
    best = measured("best", 100, range(2))
    slow = measured("slow", 80, range(3))
    wrong = measured("wrong", 99.9, range(40), rounds=SHAKY)
    found = placed(best, slow, wrong)
    assert found["best"].notes == ()
    assert found["slow"].standing == found["wrong"].standing == "dominated"
    assert found["slow"].dominated_by == found["wrong"].dominated_by == "best"
    assert found["slow"].notes == (
        "its top-1 is not distinguishable from best's (p = 1, +0 -1 of 200)",
    )
    (note,) = found["wrong"].notes
    assert note.startswith("its speed is not distinguishable from best's (ratio 0.9")


def test_tied_when_nothing_is_clear_or_equal() -> None:
    best = measured("best", 100, range(2))
    near = measured("near", 99, range(3), rounds=SHAKY)
    same = measured("same", 99, range(2), rounds=SHAKY)
    found = placed(best, near, same)
    assert found["near"].standing == found["same"].standing == "tied"
    assert found["near"].dominated_by == found["same"].dominated_by == "best"
    assert [note.split(" is not")[0] for note in found["near"].notes] == ["its speed", "its top-1"]
    assert [note.split(" is not")[0] for note in found["same"].notes] == ["its speed"]


def test_one_clear_witness_below_the_front_is_enough() -> None:
    """The front's point is noisy and ``low`` may equal it. ``middle`` is clearly faster."""
    best = measured("best", 103, range(2), rounds=SHAKY)
    middle = measured("middle", 102, range(3))
    low = measured("low", 98, range(4))
    assert standings(best, low) == {"best": "front", "low": "tied"}
    found = placed(best, middle, low)
    assert found["middle"].standing == "tied"
    assert (found["low"].standing, found["low"].dominated_by) == ("dominated", "middle")


def test_proof_names_the_dominator_before_missing_knowledge_does() -> None:
    published = Point("published", 120.0, 100.0)
    found = placed(published, measured("middle", 110, range(1)), measured("low", 50, range(3)))
    assert (found["low"].standing, found["low"].dominated_by) == ("dominated", "middle")
    assert (found["middle"].standing, found["middle"].dominated_by) == ("dominated", "published")
    assert all("not known to differ" in note for note in found["middle"].notes)


def test_of_several_clear_dominators_the_fronts_most_accurate_is_named() -> None:
    fast = measured("fast", 120, range(5))
    below = measured("below", 104, range(3))
    low = measured("low", 100, range(6))
    for rounds, name in ((STEADY, "right"), (SHAKY, "fast")):
        right = measured("right", 105, range(2), rounds=rounds)
        assert placed(fast, right, below, low)["low"].dominated_by == name


def test_front_neighbours_inside_the_noise_are_noted_on_the_one_that_lives_by_it() -> None:
    fast = measured("fast", 120, range(30))
    close = measured("close", 100, range(29))
    found = placed(fast, close)
    assert {each.standing for each in found.values()} == {"front"}
    assert found["fast"].notes == ()
    assert found["close"].notes == (
        "its top-1 is not distinguishable from fast's, which is faster (p = 1, +1 -0 of 200)",
    )
    shaky = measured("shaky", 101, range(30), rounds=SHAKY)
    found = placed(shaky, measured("right", 100))
    assert found["right"].notes == ()
    (note,) = found["shaky"].notes
    assert note.startswith("its speed is not distinguishable from right's, which is more accurate")


def test_only_the_nearest_doubt_is_noted() -> None:
    found = placed(
        *(measured(f"p{i}", 103 - i, range(30 - i), rounds=SHAKY[i:] + SHAKY[:i]) for i in range(4))
    )
    subjects = {name: [n.split(", ")[0] for n in each.notes] for name, each in found.items()}
    top1, speed = "its top-1 is not distinguishable from", "its speed is not distinguishable from"
    assert subjects == {
        "p0": [f"{speed} p1's"],
        "p1": [f"{top1} p0's", f"{speed} p2's"],
        "p2": [f"{top1} p1's", f"{speed} p3's"],
        "p3": [f"{top1} p2's"],
    }


def test_a_clear_neighbour_does_not_hide_a_doubt_further_on() -> None:
    right = measured("right", 100, range(20, 30))
    near = measured("near", 101, range(20, 36))
    far = measured("far", 120, range(40, 57))
    assert compare_top1(right, near).is_distinguishable
    found = placed(right, near, far)
    assert {each.standing for each in found.values()} == {"front"}
    assert found["right"].notes == (
        "its top-1 is not distinguishable from far's, which is faster (p = 0.248, +17 -10 of 200)",
    )
    assert "far's, which is faster (p = 1" in found["near"].notes[0]


def test_equal_points_share_the_front_and_say_so() -> None:
    a, b = Point("a", 10.0, 50.0), Point("b", 10.0, 50.0)
    found = placed(a, b, Point("c", 10.0, 49.0))
    assert found["a"].notes == ("its speed and its top-1 equal b's",)
    assert found["b"].notes == ("its speed and its top-1 equal a's",)
    assert (found["c"].standing, found["c"].dominated_by) == ("dominated", "a")


def test_no_points_and_one() -> None:
    assert front([]) == []
    one = Point("a", 1.0, 0.0)
    assert front([one]) == [ParetoRank(one, "front", None, ())]


def test_bad_points_are_refused() -> None:
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a: a speed is finite and above 0"):
            Point("a", speed, 50)
        with pytest.raises(ValueError, match="a: a speed is finite and above 0"):
            Point("a", 1.0, 50, rounds=(1.0, speed))
    for top1 in (-0.1, 100.1, math.nan):
        with pytest.raises(ValueError, match="percent"):
            Point("a", 1.0, top1)
    with pytest.raises(ValueError, match="hits of 50"):
        Point("a", 1.0, 51.0, hits=(True, False))
    assert Point("a", 1.0, 67, hits=(True, True, False)).top1 == 67
    with pytest.raises(ValueError, match="two points have the name 'a'"):
        front([Point("a", 1, 2), Point("b", 1, 2), Point("a", 3, 4)])


@st.composite
def points(draw: st.DrawFn) -> list[Point]:
    """A small value range gives equal coordinates and all ranks."""
    found = []
    for i in range(draw(st.integers(1, 7))):
        hits = draw(st.just(()) | st.lists(st.booleans(), min_size=12, max_size=12).map(tuple))
        top1 = 100 * sum(hits) / len(hits) if hits else draw(st.integers(0, 4)) * 25.0
        speed = float(draw(st.integers(10, 16)))
        shares = draw(st.lists(st.sampled_from((0.5, 1.0, 1.25)), max_size=5))
        found.append(Point(f"p{i}", speed, top1, tuple(speed * each for each in shares), hits))
    return found


def slow_front(given_points: list[Point]) -> set[str]:
    """Compute the front from the fastest point down: points at or above the best top-1."""
    best, corners = -1.0, set()
    for point in sorted(given_points, key=lambda q: (-q.speed, -q.top1)):
        if point.top1 > best:
            best = point.top1
            corners.add((point.speed, point.top1))
    return {point.name for point in given_points if (point.speed, point.top1) in corners}


@given(points())
def test_the_front_is_the_staircase_and_standings_rest_on_comparisons(given_: list[Point]) -> None:
    found = front(given_)
    assert [each.point for each in found] == given_
    on = {each.point.name for each in found if each.standing == "front"}
    assert on == slow_front(given_)
    assert on
    by_name = {point.name: point for point in given_}
    for each in found:
        assert (each.dominated_by is None) == (each.standing == "front")
        others = [q for q in given_ if q.name != each.point.name]
        above = [q for q in others if slow_front([each.point, q]) == {q.name}]
        assert bool(above) == (each.standing != "front")
        real = [
            compare(each.point, q).is_taken_as_real
            for q in above
            for compare in (compare_speed, compare_top1)
        ]
        assert any(real) == (each.standing == "dominated")
        if each.dominated_by is not None:
            assert by_name[each.dominated_by] in above
        if each.standing == "tied":
            assert each.notes


@given(points(), st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(given_: list[Point], random: object) -> None:
    mixed = list(given_)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert placed(*mixed) == placed(*given_)


@given(points(), st.sampled_from((0.125, 4.0)))
def test_the_unit_of_speed_does_not_matter(given_: list[Point], scale: float) -> None:
    scaled = [
        dataclasses.replace(
            q, speed=q.speed * scale, rounds=tuple(each * scale for each in q.rounds)
        )
        for q in given_
    ]
    found, wanted = placed(*scaled), placed(*given_)
    for name, each in wanted.items():
        assert found[name].standing == each.standing
        assert found[name].dominated_by == each.dominated_by


@given(points(), st.data())
def test_a_dominated_newcomer_leaves_the_front_as_it_is(
    given_: list[Point], data: st.DataObject
) -> None:
    above = data.draw(st.sampled_from(given_))
    slower = above.speed - data.draw(st.sampled_from((1.0, 0.5)))
    worse = above.top1 * data.draw(st.sampled_from((0.5, 1.0)))
    found = placed(*given_, Point("new", slower, worse))
    assert found.pop("new").standing == "dominated"
    was = placed(*given_)
    assert {n: p for n, p in found.items() if p.standing == "front"} == {
        n: p for n, p in was.items() if p.standing == "front"
    }


@given(points(), st.data())
def test_comparisons_mirror(given_: list[Point], data: st.DataObject) -> None:
    a, b = data.draw(st.sampled_from(given_)), data.draw(st.sampled_from(given_))
    turned = {"first": "second", "second": "first", None: None}
    for compare in (compare_speed, compare_top1):
        there, back = compare(a, b), compare(b, a)
        assert there.better == turned[back.better]
        assert (there.is_known, there.is_distinguishable) == (
            back.is_known,
            back.is_distinguishable,
        )
