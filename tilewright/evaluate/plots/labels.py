"""Label placement in plots: rectangles, leaders and a greedy search, in points (1/72 inch).

Excludes the contents and the drawing library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LEADER_START", "MARKER_RADIUS", "Box", "Label", "Spot", "place_labels"]

MARKER_RADIUS = 4.0  # includes the edge
LEADER_START = 1.5 * MARKER_RADIUS  # outside the marker's square


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. Without width or height, it is a line."""

    x0: float
    y0: float
    x1: float
    y1: float

    def meets(self, other: Box, pad: float = 0.0) -> bool:
        """Return whether two boxes are closer than ``pad``."""
        across = self.x0 - pad < other.x1 and other.x0 < self.x1 + pad
        return across and self.y0 - pad < other.y1 and other.y0 < self.y1 + pad

    def holds(self, other: Box) -> bool:
        """Return whether ``other`` is inside this box."""
        across = self.x0 <= other.x0 and other.x1 <= self.x1
        return across and self.y0 <= other.y0 and other.y1 <= self.y1


Spot = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Label:
    """A placed label.

    Attributes:
        box: The label's box.
        leader: Line from the box to the point. None: the box is near.
        side: Part of the box that faces the point.
    """

    box: Box
    leader: tuple[Spot, Spot] | None
    side: tuple[int, int]
    """Horizontal and vertical: -1 left or bottom, 0 middle, 1 right or top."""


def place_labels(
    anchors: Sequence[Spot],
    sizes: Sequence[tuple[float, float]],
    *,
    inside: Box,
    markers: Sequence[Box],
    lines: Sequence[Box] = (),
) -> list[Label] | None:
    """Return a place for a label at every anchor, in points. None: a label has no space.

    Labels do not overlap labels or markers, and are ``inside``. ``lines`` and leaders are avoided
    if the cost is low. The greedy search takes the cheapest place for each label, then repeats
    twice with all labels known. Equal inputs give equal places.
    """

    def neighbours(index: int) -> int:
        x, y = anchors[index]
        return sum(math.hypot(x - other[0], y - other[1]) < 60 for other in anchors)

    found: dict[int, Label] = {}
    order = sorted(range(len(anchors)), key=lambda index: -neighbours(index))
    for _ in range(3):
        for index in order:
            found.pop(index, None)
            room = _Obstacles(inside, markers, lines, list(found.values()))
            label = room.cheapest(anchors[index], sizes[index])
            if label is None:
                return None
            found[index] = label
    return [found[index] for index in range(len(anchors))]


@dataclass(frozen=True, slots=True)
class _Obstacles:
    """Obstacles for a label."""

    inside: Box
    markers: Sequence[Box]
    lines: Sequence[Box]
    labels: Sequence[Label]

    def cheapest(self, anchor: Spot, size: tuple[float, float]) -> Label | None:
        best, least = None, math.inf
        for distance, label in _candidates(anchor, size):
            if distance >= least:
                break
            cost = distance + self.cost(label)
            if cost < least:
                best, least = label, cost
        return best

    def cost(self, label: Label) -> float:
        box = label.box
        others = [other.box for other in self.labels]
        if not self.inside.holds(box) or any(box.meets(other, 2.0) for other in others):
            return math.inf
        if any(box.meets(marker) for marker in self.markers):
            return math.inf
        cost = 14.0 * sum(box.meets(line) for line in self.lines)
        if label.leader is None:
            cost += 6.0 * (sum(box.meets(marker, 5.0) for marker in self.markers) - 1)
        else:
            taken = [*self.markers, *others]
            cost += 50.0 * sum(_cuts(label.leader, other) for other in taken)
        for leader in (other.leader for other in self.labels if other.leader):
            cost += 50.0 * _cuts(leader, box)
            cost += 50.0 * (label.leader is not None and _cross(leader, label.leader))
        return cost


def _candidates(anchor: Spot, size: tuple[float, float]) -> Iterator[tuple[float, Label]]:
    """Yield places around ``anchor`` with their distance, nearest first."""
    x, y = anchor
    width, height = size
    for distance in (6, 14, 22, 31, 41, 52, 65, 80, 100, 125, 155, 190, 230, 280, 340, 420, 520):
        for step in range(8 if distance < 10 else 24):
            angle = 2 * math.pi * step / (8 if distance < 10 else 24)
            ux, uy = math.cos(angle), math.sin(angle)
            side = tuple(0 if abs(u) < 0.3 else -int(math.copysign(1, u)) for u in (ux, uy))
            near_x, near_y = x + distance * ux, y + distance * uy
            x0 = near_x - width * (side[0] + 1) / 2
            y0 = near_y - height * (side[1] + 1) / 2
            start = (x + LEADER_START * ux, y + LEADER_START * uy)
            leader = None if distance < 10 else (start, (near_x, near_y))
            yield distance, Label(Box(x0, y0, x0 + width, y0 + height), leader, (side[0], side[1]))


def _cross(one: tuple[Spot, Spot], other: tuple[Spot, Spot]) -> bool:
    def turn(a: Spot, b: Spot, c: Spot) -> bool:
        return (b[0] - a[0]) * (c[1] - a[1]) > (b[1] - a[1]) * (c[0] - a[0])

    (a, b), (c, d) = one, other
    return turn(a, b, c) != turn(a, b, d) and turn(c, d, a) != turn(c, d, b)


def _cuts(line: tuple[Spot, Spot], box: Box) -> bool:
    """Return whether ``line`` passes through ``box``: it starts inside or crosses a diagonal."""
    (x, y), _ = line
    if box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1:
        return True
    rising, falling = ((box.x0, box.y0), (box.x1, box.y1)), ((box.x0, box.y1), (box.x1, box.y0))
    return _cross(line, rising) or _cross(line, falling)
