"""The path of a search: nested, monotone, each candidate the best for what it saves.

Losses and savings are whole numbers here, so that sums of them are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.evaluate.search.candidates import (
    BASE_OPTION,
    Choices,
    LevelOption,
    Price,
    first_meeting,
    plan_path,
    shares,
    within_bytes,
)
from tilewright.evaluate.search.levels import Level, SweepUnit

LEVELS = [Level.parse(text) for text in ("bfp8", "bfp4", "bfp2")]
FF2 = SweepUnit("ff2", 0)
PRICES = st.sampled_from(["ms", "bytes"])


@st.composite
def part_options(draw: st.DrawFn, max_parts: int = 3) -> dict[SweepUnit, list[LevelOption]]:
    """A few parts of up to three levels, some of which save less than nothing."""
    found = {}
    for layer in range(draw(st.integers(1, max_parts))):
        options = [
            LevelOption(
                level,
                float(draw(st.integers(0, 12))),
                float(draw(st.integers(-4, 12))),
                draw(st.integers(-4, 12)),
            )
            for level in LEVELS[: draw(st.integers(0, 3))]
        ]
        found[SweepUnit("ff2", layer)] = [BASE_OPTION, *options]
    return found


def saved(choices: Choices, price: Price) -> float:
    return sum(option.saved(price) for option in choices.values())


def kl_lost(choices: Choices) -> float:
    return sum(option.kl_lost for option in choices.values())


def bargains(path: Sequence[Choices], price: Price) -> list[float]:
    """Of each step: KL won for a unit of saving given up."""
    return [
        (kl_lost(before) - kl_lost(after)) / (saved(before, price) - saved(after, price))
        for before, after in pairwise(path)
    ]


@given(part_options(), PRICES)
def test_every_step_wins_accuracy_and_costs_savings(
    found: dict[SweepUnit, list[LevelOption]], price: Price
) -> None:
    path = plan_path(found, price)
    for before, after in pairwise(path):
        assert kl_lost(after) < kl_lost(before)
        assert saved(after, price) < saved(before, price)
        (changed,) = [part for part in after if after[part] != before[part]]
        assert after[changed].kl_lost < before[changed].kl_lost, "no part becomes less accurate"
    found_bargains = bargains(path, price)
    assert found_bargains == sorted(found_bargains, reverse=True), "the best ones come first"


@given(part_options(), PRICES)
def test_the_ends_are_the_cheapest_and_the_most_accurate(
    found: dict[SweepUnit, list[LevelOption]], price: Price
) -> None:
    path = plan_path(found, price)
    for part, options in found.items():
        most = max(option.saved(price) for option in options)
        best = min(o.kl_lost for o in options if o.saved(price) == most)
        chosen = path[0][part]
        assert (chosen.saved(price), chosen.kl_lost) == (most, best)
        least = min(option.kl_lost for option in options)
        most = max(o.saved(price) for o in options if o.kl_lost == least)
        chosen = path[-1][part]
        assert (chosen.kl_lost, chosen.saved(price)) == (least, most)


@given(part_options(), PRICES)
def test_no_other_choice_saves_as_much_and_loses_less(
    found: dict[SweepUnit, list[LevelOption]], price: Price
) -> None:
    """By trying all of them: the relaxation is exact at every step."""
    every = [
        (sum(o.saved(price) for o in options), sum(o.kl_lost for o in options))
        for options in product(*found.values())
    ]
    for choices in plan_path(found, price):
        as_good = [lost for other, lost in every if other >= saved(choices, price)]
        assert min(as_good) == kl_lost(choices)


@given(part_options(), PRICES)
def test_each_candidate_is_best_for_its_bargain(
    found: dict[SweepUnit, list[LevelOption]], price: Price
) -> None:
    """Everett's multiplier: with the last step's bargain as the price of a unit."""
    path = plan_path(found, price)
    for worth, choices in zip(bargains(path, price), path[1:], strict=True):
        for part, options in found.items():
            costs = [option.kl_lost - worth * option.saved(price) for option in options]
            chosen = choices[part]
            mine = chosen.kl_lost - worth * chosen.saved(price)
            assert mine == pytest.approx(min(costs), abs=1e-9)


def path_of(
    *options: tuple[float, float], price: Price = "ms"
) -> tuple[LevelOption, list[LevelOption]]:
    """Where a part of (KL lost, saved) options starts, and what its steps take it to."""
    made = [
        LevelOption(LEVELS[at % 3], lost, gain, round(gain))
        for at, (lost, gain) in enumerate(options)
    ]
    start, *steps = (choices[FF2] for choices in plan_path({FF2: [BASE_OPTION, *made]}, price))
    return start, steps


def test_the_hull_by_hand() -> None:
    start, steps = path_of((1.0, 4.0), (3.0, 6.0))
    assert (start.kl_lost, [step.kl_lost for step in steps]) == (3.0, [1.0, 0.0])
    start, steps = path_of((2.9, 4.0), (3.0, 6.0))  # above the line to the base: never chosen
    assert (start.kl_lost, [step.kl_lost for step in steps]) == (3.0, [0.0])
    start, steps = path_of((2.0, 4.0), (3.0, 6.0))  # on the line: one step is enough
    assert (start.kl_lost, [step.kl_lost for step in steps]) == (3.0, [0.0])


def test_of_equal_savings_the_more_accurate_is_taken() -> None:
    start, steps = path_of((2.0, 5.0), (1.0, 5.0))
    assert start.kl_lost == 1.0 and steps == [BASE_OPTION]


def test_what_saves_less_than_nothing_is_never_taken() -> None:
    start, steps = path_of((1.0, -3.0), (0.0, -1.0))
    assert start == BASE_OPTION and steps == []
    assert path_of((1.0, -3.0), (2.0, 1.0))[1] == [BASE_OPTION]


def test_what_costs_nothing_is_never_given_up() -> None:
    start, steps = path_of((0.0, 5.0))
    assert start.saved("ms") == 5.0 and steps == []


def test_bytes_and_time_are_two_prices() -> None:
    fast, small = LevelOption(LEVELS[0], 1.0, 9.0, 1), LevelOption(LEVELS[1], 1.0, 1.0, 9)
    options = {FF2: [BASE_OPTION, fast, small]}
    assert plan_path(options, "ms")[0][FF2] == fast
    assert plan_path(options, "bytes")[0][FF2] == small


def test_no_parts_have_no_path() -> None:
    assert plan_path({}, "ms") == [{}]


def test_rounding_does_not_take_a_part_s_steps_out_of_order() -> None:
    options = (
        (0.0003795200987233509, 0.029703379242961937),
        (0.002656640691063456, 0.20792365470073357),
        (0.0011385602961700527, 0.08911013772888582),
    )
    _, steps = path_of(*options)
    assert steps[-1] == BASE_OPTION


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 90))
def test_the_first_that_meets_a_bound_is_found(low: int, size: int, change: int) -> None:
    asked: list[int] = []

    def meets(number: int) -> bool:
        asked.append(number)
        return number >= change

    high = low + size
    expected = next((number for number in range(low, high + 1) if number >= change), None)
    assert first_meeting(low, high, meets) == expected
    assert len(asked) <= 2 + math.ceil(math.log2(size + 1))
    assert len(set(asked)) == len(asked) or size == 0, "measuring is dear"
    assert all(low <= number <= high for number in asked)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_with_noise_what_is_found_meets_the_bound(noisy: list[bool]) -> None:
    found = first_meeting(0, len(noisy) - 1, noisy.__getitem__)
    assert (found is None) is (not noisy[-1])
    if found is not None:
        assert noisy[found]
        assert found == 0 or not noisy[found - 1], "a change from not meeting to meeting"


@given(part_options(), PRICES, st.integers(-10, 60))
def test_the_most_steps_within_a_size(
    found: dict[SweepUnit, list[LevelOption]], price: Price, max_bytes: int
) -> None:
    path = plan_path(found, price)
    base = 24

    def size(number: int) -> int:
        return base - sum(option.bytes_saved for option in path[number].values())

    fits = [number for number in range(len(path)) if size(number) <= max_bytes]
    assert within_bytes(path, base, max_bytes) == (fits[-1] if fits else None)
    assert within_bytes(path, base, None) == len(path) - 1


LOSSES: st.SearchStrategy[Sequence[tuple[float, float]]] = st.lists(
    st.tuples(st.floats(-1, 10), st.floats(0, 1)), min_size=1, max_size=8
)


@given(LOSSES)
def test_shares_add_up_and_none_is_for_free(measured: Sequence[tuple[float, float]]) -> None:
    parts = [SweepUnit("ff2", layer) for layer in range(len(measured))]
    found = shares(
        {part: lost for part, (lost, _) in zip(parts, measured, strict=True)},
        {part: error for part, (_, error) in zip(parts, measured, strict=True)},
    )
    assert sum(found.values()) == pytest.approx(1)
    assert all(share > 0 for share in found.values())
    for one, (lost, error) in zip(parts, measured, strict=True):
        for other, (theirs, noise) in zip(parts, measured, strict=True):
            if lost >= theirs and error >= noise:
                assert found[one] >= found[other]


def test_shares_with_an_unknown_error() -> None:
    a, b = SweepUnit("ff2", 0), SweepUnit("ff2", 1)
    found = shares({a: 0.3, b: 0.1}, {a: math.inf, b: 0.01})
    assert sum(found.values()) == pytest.approx(1)


def test_shares_by_hand() -> None:
    a, b, c = (SweepUnit("ff2", layer) for layer in range(3))
    found = shares({a: 0.3, b: 0.1, c: -0.2}, {a: 0.1, b: 0.4, c: 0.0})
    assert found[a] == pytest.approx(0.3 / 0.5) and found[b] == pytest.approx(0.2 / 0.5)
    assert found[c] == pytest.approx(0, abs=1e-9)
    assert shares({a: 0.0, b: 0.0}, {a: 0.0, b: 0.0}) == {a: 0.5, b: 0.5}
    assert shares({}, {}) == {}
