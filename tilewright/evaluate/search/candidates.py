"""A guided search: what each part costs and wins at each level, and in which order to raise parts.

Pure: it is handed what was measured and gives configurations to try; measuring is not known here.
A single part's loss is measured at one level; at another it has its share of what its whole group
was measured to lose there. Lost accuracies are added up as KL divergences, which is right to first
order for errors that are independent of each other; whether it holds is for the measurement of the
result to say.
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

Held = Mapping[tuple[str, int | None, str], int]
"""Bytes by group, layer and kind of holding."""


@dataclass(frozen=True, slots=True)
class LevelOption:
    """A level a part may have, beside the base: KL added, ms a step and bytes saved.

    ``level`` is None for the base itself.
    """

    level: Level | None
    kl_lost: float
    ms_saved: float
    bytes_saved: int

    def saved(self, price: Price) -> float:
        """What the option saves a step: ms, or bytes, as ``price`` says."""
        return self.ms_saved if price == "ms" else float(self.bytes_saved)


BASE_OPTION = LevelOption(None, 0.0, 0.0, 0)

Choices = Mapping[SweepUnit, LevelOption]
"""A configuration: the option of every part."""


def part_options(
    parts: Sequence[SweepUnit],
    sensitivity: Sensitivity,
    group_losses: Mapping[tuple[str, Level], float],
    held: Mapping[Level | None, Held],
    cost_model: CostModel,
) -> dict[SweepUnit, list[LevelOption]]:
    """List each part's options: the base, and each level it was measured at whose time is known.

    Args:
        group_losses: KL lost with a whole group at a level.
        held: the model's weights as held with everything at a level; None is the base.
    """
    share = _shares(parts, sensitivity)
    found = {part: [BASE_OPTION] for part in parts}
    for part, options in found.items():
        before = _of(held[None], part)
        for level in (level for level in held if level is not None):
            loss, after = group_losses.get((part.group, level)), _of(held[level], part)
            if loss is None or not (cost_model.knows(before) and cost_model.knows(after)):
                continue
            saved = cost_model.predict(before) - cost_model.predict(after)
            bytes_saved = sum(before.values()) - sum(after.values())
            options.append(LevelOption(level, max(loss, 0.0) * share[part], saved, bytes_saved))
    return found


def groups_without_shares(parts: Sequence[SweepUnit], sensitivity: Sensitivity) -> list[str]:
    """The groups of which some single layer was not measured."""
    missing = [part.group for part in parts if sensitivity.find(str(part)) is None]
    return list(dict.fromkeys(missing))


def _shares(parts: Sequence[SweepUnit], sensitivity: Sensitivity) -> dict[SweepUnit, float]:
    """Each part's share of its group's loss, by single layers where measured; else equal ones."""
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
    """Each part's share of its group's loss, from single parts' measurements; they add up to 1.

    One that cannot be told from nothing counts with half its error: nothing is for free.
    """
    known = {part: error if isfinite(error) else 0.0 for part, error in errors.items()}
    floored = {part: max(kl, known[part] / 2, 1e-12) for part, kl in kl_lost.items()}
    total = sum(floored.values())
    return {part: kl / total for part, kl in floored.items()}


def _of(held: Held, part: SweepUnit) -> dict[str, int]:
    """A part's bytes by kind."""
    return {
        kind: size
        for (group, layer, kind), size in held.items()
        if (group, layer) == (part.group, part.layer)
    }


def plan_path(options: Mapping[SweepUnit, Sequence[LevelOption]], price: Price) -> list[Choices]:
    """List the way from the cheapest configuration to the most accurate, a part raised a step.

    Every part starts where it saves most and climbs its convex hull; the steps of all parts are
    taken in the order of KL won for each unit of saving given up (the Lagrangian relaxation of
    a knapsack: each is the most accurate one predicted for what it saves, exact at every step,
    H. Everett, Operations Research 11, 1963).
    """
    cheapest: dict[SweepUnit, LevelOption] = {}
    steps: list[tuple[float, SweepUnit, LevelOption]] = []
    for part, each in options.items():
        hull = _hull(each, price)
        cheapest[part] = hull[0]
        bargain = inf
        for before, after in pairwise(hull):
            # along a hull bargains get worse, which rounding must not turn round
            bargain = min(bargain, _bargain(before, after, price))
            steps.append((bargain, part, after))
    path: list[Choices] = [cheapest]
    for _, part, option in sorted(steps, key=lambda step: -step[0]):
        path.append({**path[-1], part: option})
    return path


def _hull(options: Sequence[LevelOption], price: Price) -> list[LevelOption]:
    """The options from the one that saves most to the most accurate, each step a worse bargain."""
    by_saving = sorted(options, key=lambda o: (-o.saved(price), o.kl_lost, -o.bytes_saved))
    hull: list[LevelOption] = []
    for option in by_saving:
        if hull and option.kl_lost >= hull[-1].kl_lost:
            continue  # saves less and is no more accurate
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
    """The fewest steps from ``low`` to ``high`` that meet the bound, by bisection.

    ``meets`` is taken to change once; where noise makes it change more often one of the changes is
    found. None where not even ``high`` does.
    """
    return low + bisect_left(range(low, high), True, key=meets) if meets(high) else None


def within_bytes(path: Sequence[Choices], base_bytes: int, max_bytes: int | None) -> int | None:
    """The most steps that leave the weights within a size, if there is one; None where none do.

    A step may also save bytes (a target may hold a lower level in more of them), so all are tried.
    """
    fitting = (
        number
        for number, choices in enumerate(path)
        if max_bytes is None
        or base_bytes - sum(option.bytes_saved for option in choices.values()) <= max_bytes
    )
    return max(fitting, default=None)
