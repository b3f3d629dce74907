"""The speed and accuracy front of measured points, and its statistical evidence.

Pure Python on numbers. Excludes models, files and plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tilewright.evaluate.results.stats import MIN_ROUNDS, discordant, mcnemar, paired_ratio

ALPHA = 0.05
"""Significance level of a single comparison, without correction for multiple comparisons. Of 20
comparisons between equal points, about one shows a difference.
"""

_ROUNDING = 0.5 + 1e-9  # a top-1 may be a whole percentage


@dataclass(frozen=True, slots=True)
class Point:
    """A measured or published configuration as a point of speed and accuracy.

    Attributes:
        name: The configuration's name for printing. Unique on a front.
        speed: Median tokens per second for one user.
        top1: Percentage.
        rounds: Speed in each interleaved round, in one order for all points. Round i of two points
            was measured at about the same time. Empty: unknown.
        hits: Whether each position is correct, at the same positions for all points. Empty:
            unknown.
        top1_interval: Percentages, for printing only.
        num_bytes: Size in bytes, for printing only.
        speed_error: Relative error of a predicted speed. Infinite: unknown. None: measured.

    Raises:
        ValueError: A speed is not finite or not above 0, or top1 is not a percentage or differs
            from the hits.
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
    """Comparison of two points in speed or top-1.

    Attributes:
        better: The better point by the printed estimates. None: equal.
        is_known: The difference's noise is known.
        is_distinguishable: The difference exceeds the noise in the estimates' direction.
        evidence: The comparison's basis, first against second: ``p = 0.0352, +12 -3 of 512``.
    """

    better: Literal["first", "second"] | None
    is_known: bool
    is_distinguishable: bool
    evidence: str

    @property
    def is_taken_as_real(self) -> bool:
        """Whether the front uses the difference: it is significant, or its noise is unknown."""
        return self.better is not None and (self.is_distinguishable or not self.is_known)


def compare_speed(a: Point, b: Point) -> Comparison:
    """Compare median speeds, with noise from the ratio of the rounds (`paired_ratio`).

    Predicted speeds use the time model's error, because all their rounds are equal.
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
    """Compare top-1 percentages, with noise from the positions that differ (`mcnemar`)."""
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
    """Return a comparison with known noise.

    Args:
        estimate, measured: Printed and tested difference. Positive: the first is better. They may
            have different signs; then no difference is claimed.
    """
    agree = estimate * measured > 0
    if is_significant and not agree:
        evidence += "; the printed estimates do not show it"
    return Comparison(_better(estimate), True, is_significant and agree, evidence)


@dataclass(frozen=True, slots=True)
class ParetoRank:
    """Position of a point relative to the front; see `front`.

    Attributes:
        dominated_by: A dominating point's name by the estimates. None on the front.
        notes: Unproven parts of the rank, as text.
    """

    point: Point
    standing: Literal["front", "tied", "dominated"]
    dominated_by: str | None
    notes: tuple[str, ...]


def front(points: Sequence[Point]) -> list[ParetoRank]:
    """Return every point's rank, in input order.

    - ``front``: By the estimates, no point is at least as good in both speed and top-1 and better
      in one. Equal points share the front. A predicted point that is faster only within the time
      model's error does not join a more accurate point on the front.
    - ``dominated``: A better point by the estimates is significantly better in speed or top-1, or
      has published metrics without known noise.
    - ``tied``: Every better point by the estimates is within the noise in both.

    A single significant loss dominates. Two configurations with the same true top-1 never become
    distinguishable in top-1, so a test in both would call half the speed tied. Without a
    significant loss, a tied point may be on the true front. The notes name the coordinate without
    evidence.

    The notes of a front point name, for both coordinates, the nearest front point that is better in
    the second coordinate and not distinguishable in the first.

    Raises:
        ValueError: Two points have the same name.
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
    """Return whether ``a`` is more accurate, and slower by at most the time model's error."""
    is_predicted = a.speed_error is not None or b.speed_error is not None
    return a.top1 > b.top1 and is_predicted and not compare_speed(a, b).is_distinguishable


def _beyond_model_error(members: Sequence[Point]) -> list[Point]:
    """Return the members without points that are on the front only by a speed within the model's
    error.

    The most accurate member remains, with all members significantly faster than every remaining
    member.
    """
    kept: list[Point] = []
    for point in sorted(members, key=lambda p: (-p.top1, -p.speed)):
        if not any(_is_inside_model_error(other, point) for other in kept):
            kept.append(point)
    return kept


def _below(point: Point, above: Sequence[Point], best: set[str]) -> ParetoRank:
    """Return the rank of a point below the points ``above``, which dominate it by the estimates.

    Significant evidence precedes unknown noise, then members of the front (``best``), then
    accuracy.
    """
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
    """Return a note if the estimates show a difference without significance."""
    if compared.better is None or compared.is_distinguishable:
        return None
    verb = "is not distinguishable" if compared.is_known else "is not known to differ"
    return f"its {what} {verb} from {whose} ({compared.evidence})"
