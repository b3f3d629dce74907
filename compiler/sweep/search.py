"""A guided search: which parts to keep precise, in which order, for what they cost and win.

Pure: it is handed what parts cost and gives configurations to try; measuring is not known here.
Lost accuracies are added up as KL divergences, which is right to first order for errors that are
independent of each other; whether it holds is for the measurement of the result to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from tilewright.compiler.sweep.levels import Level, Part

Price = Literal["ms", "bytes"]


@dataclass(frozen=True, slots=True)
class Option:
    """A level a part may have, beside the base: KL added, ms a step and bytes saved.

    ``level`` is None for the base itself.
    """

    level: Level | None
    kl_lost: float
    ms_saved: float
    bytes_saved: int

    def saved(self, price: Price) -> float:
        """What it saves of what is to be saved."""
        return self.ms_saved if price == "ms" else float(self.bytes_saved)


BASE_OPTION = Option(None, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Item:
    """A part of the model and its options, the base among them."""

    part: Part
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One part raised from an option to a more accurate one."""

    part: Part
    to: Option
    kl_won: float
    price: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Every part's option after so many steps up from the cheapest, and what they come to."""

    num_steps: int
    choices: Mapping[Part, Option]

    @property
    def levels(self) -> dict[Part, Level]:
        """The parts that are not as in the base."""
        return {part: o.level for part, o in self.choices.items() if o.level is not None}

    @property
    def kl_lost(self) -> float:
        """Predicted, in nats."""
        return sum(option.kl_lost for option in self.choices.values())

    @property
    def ms_saved(self) -> float:
        """Predicted, a decode step."""
        return sum(option.ms_saved for option in self.choices.values())

    @property
    def bytes_saved(self) -> int:
        """Of the weights as the target holds them."""
        return sum(option.bytes_saved for option in self.choices.values())


@dataclass(frozen=True, slots=True)
class Path:
    """From the cheapest configuration to the most accurate one, the best bargains first."""

    cheapest: Mapping[Part, Option]
    steps: tuple[Step, ...]

    def candidate(self, num_steps: int) -> Candidate:
        """The configuration after the first steps."""
        choices = dict(self.cheapest)
        for step in self.steps[:num_steps]:
            choices[step.part] = step.to
        return Candidate(num_steps, choices)


def plan_path(items: Sequence[Item], price: Price) -> Path:
    """Nested configurations; each is the most accurate one predicted for what it saves.

    Every part starts where it saves most and climbs its convex hull; the steps of all parts are
    taken in the order of KL won for each unit of saving given up (the Lagrangian relaxation of
    a knapsack: exact at every step, H. Everett, Operations Research 11, 1963).
    """
    cheapest: dict[Part, Option] = {}
    steps: list[tuple[float, Step]] = []
    for item in items:
        hull = _hull(item.options, price)
        cheapest[item.part] = hull[0]
        bargain = inf
        for before, after in pairwise(hull):
            won = before.kl_lost - after.kl_lost
            step = Step(item.part, after, won, before.saved(price) - after.saved(price))
            # along a hull bargains get worse, which rounding must not turn round
            bargain = min(bargain, won / step.price)
            steps.append((bargain, step))
    steps.sort(key=lambda each: -each[0])
    return Path(cheapest, tuple(step for _, step in steps))


def _hull(options: Sequence[Option], price: Price) -> list[Option]:
    """From the one that saves most to the most accurate; each step a worse bargain."""
    by_saving = sorted(options, key=lambda o: (-o.saved(price), o.kl_lost, -o.bytes_saved))
    hull: list[Option] = []
    for option in by_saving:
        if hull and option.kl_lost >= hull[-1].kl_lost:
            continue  # saves less and is no more accurate
        while len(hull) > 1 and _bargain(hull[-2], hull[-1], price) <= _bargain(
            hull[-2], option, price
        ):
            hull.pop()
        hull.append(option)
    return hull


def _bargain(before: Option, after: Option, price: Price) -> float:
    given_up = before.saved(price) - after.saved(price)
    return (before.kl_lost - after.kl_lost) / given_up if given_up > 0 else float("inf")


def first_meeting(low: int, high: int, meets: Callable[[int], bool]) -> int | None:
    """The fewest steps from ``low`` to ``high`` that meet the bound, by bisection.

    ``meets`` is taken to change once; where noise makes it change more often one of the changes is
    found. None where not even ``high`` does.
    """
    if not meets(high):
        return None
    if meets(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def within_bytes(path: Path, base_bytes: int, max_bytes: int) -> int | None:
    """The most steps that leave the weights within a size; None where none do.

    A step may also save bytes (a target may hold a lower level in more of them), so all are tried.
    """
    fitting = [
        number
        for number in range(len(path.steps) + 1)
        if base_bytes - path.candidate(number).bytes_saved <= max_bytes
    ]
    return max(fitting, default=None)


def shares(kl_lost: Mapping[Part, float], errors: Mapping[Part, float]) -> dict[Part, float]:
    """Each part's share of its group's loss, from single parts' measurements; they add up to 1.

    One that cannot be told from nothing counts with half its error: nothing is for free.
    """
    known = {part: error if isfinite(error) else 0.0 for part, error in errors.items()}
    floored = {part: max(kl, known[part] / 2, 1e-12) for part, kl in kl_lost.items()}
    total = sum(floored.values())
    return {part: kl / total for part, kl in floored.items()}
