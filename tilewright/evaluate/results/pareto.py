"""The speed / accuracy front of measured points, and what on it is proven.

Pure Python on plain numbers; knows nothing of models, of files, or of how points are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tilewright.evaluate.results.stats import MIN_ROUNDS, discordant, mcnemar, paired_ratio

ALPHA = 0.05
"""The level of every single comparison. Nothing is corrected for their number: of 20 comparisons
between points that are the same, about one is called a difference."""

_ROUNDING = 0.5 + 1e-9  # a top-1 may be given in whole percents


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration, measured or published, as a point of speed and accuracy.

    Attributes:
        name: its configuration or configurations, for printing; the points of a front have
            different names.
        speed: tokens per second and user, the median.
        top1: percent.
        rounds: its speed in each interleaved round, in one order for all points: round i of two
            points was measured close together. Empty: unknown.
        hits: whether it got each position right, the same positions for all points. Empty:
            unknown.
        speed_error: of a predicted speed, the share of it that the time model says it may be off
            by; infinite where the model says none. None: not predicted.
        top1_interval: percent; carried for printing only, as is ``num_bytes``.

    Raises:
        ValueError: if a speed is not finite and above 0, or top1 is no percentage or not that of
            the hits.
    """

    name: str
    speed: float
    top1: float
    rounds: tuple[float, ...] = ()
    hits: tuple[bool, ...] = ()
    top1_interval: tuple[float, float] | None = None
    num_bytes: int | None = None
    speed_error: float | None = None

    def __post_init__(self) -> None:
        for speed in (self.speed, *self.rounds):
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError(f"{self.name}: a speed is finite and above 0, got {speed}")
        if not 0 <= self.top1 <= 100:
            raise ValueError(f"{self.name}: top-1 is in [0, 100] percent, got {self.top1}")
        if self.hits:
            share = 100 * sum(self.hits) / len(self.hits)
            if abs(share - self.top1) > _ROUNDING:
                raise ValueError(f"{self.name}: a top-1 of {self.top1} %, but hits of {share} %")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two points compare in one coordinate, and how sure that is.

    Attributes:
        better: which is better by the printed estimates; None where these are equal.
        is_known: whether the noise of the difference is known at all.
        is_distinguishable: whether the difference is known to be beyond the noise, and in the
            direction of the estimates.
        evidence: what that rests on, first against second: ``p = 0.0352, +12 -3 of 512``.
    """

    better: Literal["first", "second"] | None
    is_known: bool
    is_distinguishable: bool
    evidence: str

    @property
    def is_taken_as_real(self) -> bool:
        """Whether the front counts the difference: it is proven, or no noise is known."""
        return self.better is not None and (self.is_distinguishable or not self.is_known)


def compare_speed(a: Point, b: Point) -> Comparison:
    """The speeds by their medians, the noise by the ratio of the rounds (`paired_ratio`); of
    predicted ones by the time model's error, as all rounds of one are the same.
    """
    estimate = a.speed - b.speed
    if a.speed_error is not None or b.speed_error is not None:
        return _compare_predicted(a, b, max(a.speed_error or 0, b.speed_error or 0))
    num_rounds = min(len(a.rounds), len(b.rounds))
    if num_rounds == 0:
        return _unknown(estimate, "no rounds")
    if num_rounds < MIN_ROUNDS:
        return _unknown(estimate, f"rounds: {num_rounds}, needed: {MIN_ROUNDS}")
    found = paired_ratio(a.rounds, b.rounds)
    assert found.interval is not None
    low, high = found.interval
    evidence = f"ratio {found.ratio:.3f} ({low:.3f} to {high:.3f}), {num_rounds} rounds"
    return _known(estimate, found.ratio - 1, is_significant=found.differs, evidence=evidence)


def _compare_predicted(a: Point, b: Point, error: float) -> Comparison:
    fast, slow = max(a.speed, b.speed), min(a.speed, b.speed)
    said = f"{100 * error:.0f} %" if math.isfinite(error) else "unknown"
    evidence = f"ratio {a.speed / b.speed:.3f}, the time model's error: {said}"
    return Comparison(_better(a.speed - b.speed), True, fast > slow * (1 + error), evidence)


def compare_top1(a: Point, b: Point) -> Comparison:
    """The top-1 by its percentages, the noise by the positions on which they differ (`mcnemar`)."""
    estimate = a.top1 - b.top1
    if not (a.hits and b.hits):
        return _unknown(estimate, "no positions")
    if len(a.hits) != len(b.hits):
        return _unknown(estimate, f"{len(a.hits)} and {len(b.hits)} positions")
    num_b, num_a = discordant(b.hits, a.hits)
    p = mcnemar(num_a, num_b)
    evidence = f"p = {p:.3g}, +{num_a} -{num_b} of {len(a.hits)}"
    return _known(estimate, num_a - num_b, is_significant=p < ALPHA, evidence=evidence)


def _better(estimate: float) -> Literal["first", "second"] | None:
    if estimate == 0:
        return None
    return "first" if estimate > 0 else "second"


def _unknown(estimate: float, reason: str) -> Comparison:
    return Comparison(_better(estimate), False, False, f"unknown: {reason}")


def _known(estimate: float, measured: float, *, is_significant: bool, evidence: str) -> Comparison:
    """``estimate``, ``measured``: above 0 where the first is better, printed and in the test.

    A median and a mean of ratios may disagree; a difference is claimed only where they agree.
    """
    agree = estimate * measured > 0
    if is_significant and not agree:
        evidence += "; the printed estimates do not show it"
    return Comparison(_better(estimate), True, is_significant and agree, evidence)


@dataclass(frozen=True, slots=True)
class ParetoRank:
    """A point's place on, at or below the front (see `front`).

    Attributes:
        dominated_by: the name of a point that dominates it by estimate; None on the front.
        notes: what about the place is not proven, in words.
    """

    point: Point
    standing: Literal["front", "tied", "dominated"]
    dominated_by: str | None
    notes: tuple[str, ...]


def front(points: Sequence[Point]) -> list[ParetoRank]:
    """Every point's standing, in the order given.

    - front: by the estimates, no other point is at least as good in speed and in top-1, and better
      in one. Points that are equal in both stand there together. Being faster by no more than the
      time model's error puts no predicted point beside one of the front that is more accurate.
    - dominated: a point that is better by the estimates is *clearly* better in speed or in top-1:
      beyond the noise, or by published figures whose noise nobody knows.
    - tied: every point that is better by the estimates is inside the noise in both.

    Why clearly in one and not in both: two configurations with the same true top-1 never become
    distinguishable in it, so that half the speed at the same top-1 would count as tied. One proven
    loss that no gain is seen to pay for is a reason to leave a point out; no proven loss at all is
    none: a tied point may be on the true front, and another run may put it there. What a dominated
    place does not prove, that the other coordinate is no better either, its notes say. Why some
    point and not the nearest one: being dominated takes one witness.

    A front point's notes name, in each coordinate, the nearest front point that is better in the
    other one and from which it cannot be told: most often its neighbour, but close relatives may
    differ clearly (few positions, all one way) where distant ones do not (many, both ways).

    Raises:
        ValueError: if two points have the same name.
    """
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two points have the name {double!r}")
    dominators = [[other for other in points if _dominates(other, point)] for point in points]
    members = _beyond_model_error(
        [point for point, above in zip(points, dominators, strict=True) if not above]
    )
    best = {member.name for member in members}
    for point, above in zip(points, dominators, strict=True):
        if point.name not in best:
            above += [q for q in members if q not in above and _is_inside_model_error(q, point)]
    return [
        _below(point, above, best) if above else _on_front(point, members)
        for point, above in zip(points, dominators, strict=True)
    ]


def _dominates(a: Point, b: Point) -> bool:
    no_worse = a.speed >= b.speed and a.top1 >= b.top1
    return no_worse and (a.speed, a.top1) != (b.speed, b.top1)


def _is_inside_model_error(a: Point, b: Point) -> bool:
    """Whether ``a`` is more accurate, and not slower by more than the time model's error."""
    is_predicted = a.speed_error is not None or b.speed_error is not None
    return a.top1 > b.top1 and is_predicted and not compare_speed(a, b).is_distinguishable


def _beyond_model_error(members: Sequence[Point]) -> list[Point]:
    """The members without those that nothing but a speed inside the time model's error put there:
    the most accurate one stays, and of the others those that are clearly faster than all kept.
    """
    kept: list[Point] = []
    for point in sorted(members, key=lambda p: (-p.top1, -p.speed)):
        if not any(_is_inside_model_error(other, point) for other in kept):
            kept.append(point)
    return kept


def _below(point: Point, above: Sequence[Point], best: set[str]) -> ParetoRank:
    """``above``: what dominates the point by estimate. Proof goes before missing knowledge, then
    the front's members (``best``), then the more accurate."""
    ordered = sorted(above, key=lambda q: (q.name not in best, -q.top1, -q.speed, q.name))
    unproven = None
    for other in ordered:
        compared = compare_speed(point, other), compare_top1(point, other)
        if any(each.is_distinguishable for each in compared):
            return _placed_below(point, other, "dominated")
        if unproven is None and any(each.is_taken_as_real for each in compared):
            unproven = other
    if unproven is not None:
        return _placed_below(point, unproven, "dominated")
    return _placed_below(point, ordered[0], "tied")


def _placed_below(point: Point, other: Point, standing: Literal["tied", "dominated"]) -> ParetoRank:
    speed, top1 = compare_speed(point, other), compare_top1(point, other)
    found = _doubt("speed", speed, f"{other.name}'s"), _doubt("top-1", top1, f"{other.name}'s")
    return ParetoRank(point, standing, other.name, tuple(note for note in found if note))


def _on_front(point: Point, members: Sequence[Point]) -> ParetoRank:
    notes = [
        f"its speed and its top-1 equal {other.name}'s"
        for other in sorted(members, key=lambda q: q.name)
        if (other.speed, other.top1) == (point.speed, point.top1) and other.name != point.name
    ]
    faster = sorted((q for q in members if q.speed > point.speed), key=lambda q: (q.speed, q.name))
    finer = sorted((q for q in members if q.top1 > point.top1), key=lambda q: (q.top1, q.name))
    for others, what, compare, how in (
        (faster, "top-1", compare_top1, "faster"),
        (finer, "speed", compare_speed, "more accurate"),
    ):
        doubts = (_doubt(what, compare(point, q), f"{q.name}'s, which is {how}") for q in others)
        notes += [doubt for doubt in doubts if doubt][:1]
    return ParetoRank(point, "front", None, tuple(notes))


def _doubt(what: str, compared: Comparison, whose: str) -> str | None:
    """The note on a difference that the estimates show and the noise does not allow to claim."""
    if compared.better is None or compared.is_distinguishable:
        return None
    verb = "is not distinguishable" if compared.is_known else "is not known to differ"
    return f"its {what} {verb} from {whose} ({compared.evidence})"
