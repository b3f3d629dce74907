"""Placing labels: nothing overlaps, leaders end at their points, and no room is said."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.evaluate.plots.labels import LEADER_START, MARKER_RADIUS, Box, place_labels

FRAME = Box(0, 0, 500, 300)


def marker(x: float, y: float) -> Box:
    return Box(x - MARKER_RADIUS, y - MARKER_RADIUS, x + MARKER_RADIUS, y + MARKER_RADIUS)


ANCHORS = st.lists(st.tuples(st.integers(20, 480), st.integers(20, 280)), max_size=14, unique=True)


@settings(max_examples=40, deadline=None)
@given(ANCHORS, st.integers(5, 160))
def test_no_label_overlaps_another_or_a_marker(anchors: list[tuple[int, int]], width: int) -> None:
    sizes = [(width + 3.0 * index, 9.0) for index in range(len(anchors))]
    markers = [marker(*anchor) for anchor in anchors]
    labels = place_labels(anchors, sizes, inside=FRAME, markers=markers)
    assert labels is not None
    for label, size in zip(labels, sizes, strict=True):
        box = label.box
        assert FRAME.holds(box)
        assert abs(box.x1 - box.x0 - size[0]) < 1e-9 and abs(box.y1 - box.y0 - size[1]) < 1e-9
        assert not any(box.meets(one) for one in markers)
    assert not any(one.box.meets(other.box) for one, other in combinations(labels, 2))


def test_a_lone_label_is_beside_its_point_without_a_leader() -> None:
    (label,) = place_labels([(250, 150)], [(60, 9)], inside=FRAME, markers=[marker(250, 150)]) or ()
    assert label.leader is None
    assert label.box.meets(marker(250, 150), 3)


def test_crowded_points_get_leaders_that_end_at_them() -> None:
    anchors = [(250 + step, 150 + step) for step in range(6)]
    markers = [marker(*anchor) for anchor in anchors]
    labels = place_labels(anchors, [(90, 9)] * 6, inside=FRAME, markers=markers)
    assert labels is not None
    leaders = [(at, one.leader[0]) for at, one in zip(anchors, labels, strict=True) if one.leader]
    assert leaders
    for (x, y), end in leaders:
        assert abs((end[0] - x) ** 2 + (end[1] - y) ** 2 - LEADER_START**2) < 1e-6


def test_lines_are_avoided() -> None:
    free = place_labels([(250, 150)], [(60, 9)], inside=FRAME, markers=[marker(250, 150)])
    line = Box(250, 150, 400, 150)  # where the label goes otherwise
    moved = place_labels(
        [(250, 150)], [(60, 9)], inside=FRAME, markers=[marker(250, 150)], lines=[line]
    )
    assert free is not None and moved is not None
    assert free[0].box.meets(line)
    assert not moved[0].box.meets(line)


def test_no_room_is_said() -> None:
    assert place_labels([(250, 150)], [(501, 9)], inside=FRAME, markers=[]) is None


def test_meets_and_holds() -> None:
    assert Box(0, 0, 2, 2).meets(Box(1, 1, 3, 3))
    assert not Box(0, 0, 2, 2).meets(Box(2, 0, 3, 2))
    assert Box(0, 0, 2, 2).meets(Box(2, 0, 3, 2), 0.1)
    assert Box(0, 0, 2, 2).meets(Box(1, -5, 1, 5))  # a line
    assert Box(0, 0, 2, 2).holds(Box(0, 0, 2, 2))
    assert not Box(0, 0, 2, 2).holds(Box(0, 0, 2.1, 2))
