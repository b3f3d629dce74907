"""Guided search: cost and gain of each part at each level, and the order of raising parts.

Pure functions from measurements to candidate configurations. A single part's loss is measured at
one level. At another level, it has its share of the group's loss there. Losses are added as KL
divergences, which is correct to first order for independent errors. The result's measurement
checks this assumption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from tilewright.evaluate.search.levels import Level, SweepUnit
from tilewright.evaluate.sweep.cost_model import CostModel
from tilewright.evaluate.sweep.sensitivity import Sensitivity

Price = Literal["ms", "bytes"]

StoredBytes = Mapping[tuple[str, int | None, str], int]
"""Bytes by group, layer and storage."""


@dataclass(frozen=True, slots=True)
class LevelOption:
    """A level for a part, relative to the base: KL added, ms per step and bytes saved.

    ``level`` is None for the base.
    """

    level: Level | None
    kl_lost: float
    ms_saved: float
    bytes_saved: int

    def saved(self, price: Price) -> float:
        """Return the saving per step in ms or in bytes, as selected by ``price``."""
        return self.ms_saved if price == "ms" else float(self.bytes_saved)


BASE_OPTION = LevelOption(None, 0.0, 0.0, 0)

Choices = Mapping[SweepUnit, LevelOption]
"""A configuration: an option for every part."""


def part_options(
    parts: Sequence[SweepUnit],
    sensitivity: Sensitivity,
    group_losses: Mapping[tuple[str, Level], float],
    stored: Mapping[Level | None, StoredBytes],
    cost_model: CostModel,
) -> dict[SweepUnit, list[LevelOption]]:
    """List each part's options: the base, and each measured level with a known time.

    Args:
        parts: groups in layers.
        sensitivity: losses of single layers.
        group_losses: KL lost with a whole group at a level.
        stored: the stored weights' bytes with all groups at a level. None: the base.
        cost_model: predicts a step's time.
    """
    share = _shares(parts, sensitivity)
    found = {part: [BASE_OPTION] for part in parts}
    for part, options in found.items():
        before = _of(stored[None], part)
        for level in (level for level in stored if level is not None):
            loss, after = group_losses.get((part.group, level)), _of(stored[level], part)
            if loss is None or not (cost_model.knows(before) and cost_model.knows(after)):
                continue
            saved = cost_model.predict(before) - cost_model.predict(after)
            bytes_saved = sum(before.values()) - sum(after.values())
            options.append(LevelOption(level, max(loss, 0.0) * share[part], saved, bytes_saved))
    return found


def groups_without_shares(parts: Sequence[SweepUnit], sensitivity: Sensitivity) -> list[str]:
    """Return the groups with an unmeasured layer."""
    missing = [part.group for part in parts if sensitivity.find(str(part)) is None]
    return list(dict.fromkeys(missing))


def _shares(parts: Sequence[SweepUnit], sensitivity: Sensitivity) -> dict[SweepUnit, float]:
    """Return each part's share of its group's loss. Unmeasured groups have equal shares."""
    unmeasured = groups_without_shares(parts, sensitivity)
    found: dict[SweepUnit, float] = {}
    for group in dict.fromkeys(part.group for part in parts):
        members = [part for part in parts if part.group == group]
        lowered = [(part, sensitivity.find(str(part))) for part in members]
        losses = {part: each.kl_lost for part, each in lowered if each is not None}
        errors = {part: each.kl_error for part, each in lowered if each is not None}
        is_known = group not in unmeasured
        found |= shares(losses, errors) if is_known else dict.fromkeys(members, 1 / len(members))
    return found


def shares(
    kl_lost: Mapping[SweepUnit, float], errors: Mapping[SweepUnit, float]
) -> dict[SweepUnit, float]:
    """Return each part's share of its group's loss, from single measurements. The sum is 1.

    A loss below the noise counts as half its error, because no part is free.
    """
    known = {part: error if isfinite(error) else 0.0 for part, error in errors.items()}
    floored = {part: max(kl, known[part] / 2, 1e-12) for part, kl in kl_lost.items()}
    total = sum(floored.values())
    return {part: kl / total for part, kl in floored.items()}


def _of(stored: StoredBytes, part: SweepUnit) -> dict[str, int]:
    """Return a part's bytes by storage."""
    return {
        kind: size
        for (group, layer, kind), size in stored.items()
        if (group, layer) == (part.group, part.layer)
    }


def plan_path(options: Mapping[SweepUnit, Sequence[LevelOption]], price: Price) -> list[Choices]:
    """List configurations from the cheapest to the most accurate. Each step raises a part.

    Every part starts at its largest saving and climbs its convex hull. Steps are sorted by the KL
    won per unit of saving. This is a knapsack's Lagrangian relaxation: each configuration is
    the most accurate prediction for its saving (H. Everett, Operations Research 11, 1963).
    """
    cheapest: dict[SweepUnit, LevelOption] = {}
    steps: list[tuple[float, SweepUnit, LevelOption]] = []
    for part, each in options.items():
        hull = _hull(each, price)
        cheapest[part] = hull[0]
        bargain = inf
        for before, after in pairwise(hull):
            # Bargains get worse along a hull. Rounding must not reverse the order.
            bargain = min(bargain, _bargain(before, after, price))
            steps.append((bargain, part, after))
    path: list[Choices] = [cheapest]
    for _, part, option in sorted(steps, key=lambda step: -step[0]):
        path.append({**path[-1], part: option})
    return path


def _hull(options: Sequence[LevelOption], price: Price) -> list[LevelOption]:
    """Return the options from the largest saving to the best accuracy, on the convex hull."""
    by_saving = sorted(options, key=lambda o: (-o.saved(price), o.kl_lost, -o.bytes_saved))
    hull: list[LevelOption] = []
    for option in by_saving:
        if hull and option.kl_lost >= hull[-1].kl_lost:
            continue  # saves less without better accuracy
        while len(hull) > 1 and _bargain(hull[-2], hull[-1], price) <= _bargain(
            hull[-2], option, price
        ):
            hull.pop()
        hull.append(option)
    return hull


def _bargain(before: LevelOption, after: LevelOption, price: Price) -> float:
    given_up = before.saved(price) - after.saved(price)
    return (before.kl_lost - after.kl_lost) / given_up if given_up > 0 else float("inf")


def first_meeting(low: int, high: int, meets: Callable[[int], bool]) -> int | None:
    """Return the fewest steps from ``low`` to ``high`` that meet the bound, by bisection.

    ``meets`` should change once. With several changes through noise, any change is found. Return
    None if ``high`` does not meet the bound.
    """
    return low + bisect_left(range(low, high), True, key=meets) if meets(high) else None


def within_bytes(path: Sequence[Choices], base_bytes: int, max_bytes: int | None) -> int | None:
    """Return the largest step count with weights within a size, or None.

    A step may also save bytes, because a target may need more bytes for a lower level. Therefore
    all steps are tried.
    """
    fitting = (
        number
        for number, choices in enumerate(path)
        if max_bytes is None
        or base_bytes - sum(option.bytes_saved for option in choices.values()) <= max_bytes
    )
    return max(fitting, default=None)
