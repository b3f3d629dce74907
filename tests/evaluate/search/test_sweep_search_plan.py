"""What a search must keep to, and the margin it asks for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.evaluate.results.record import Accuracy
from tilewright.evaluate.search.plan import GUARD, Bounds


def accuracy(num_top1: int, kl: float | None = 0.01, num_positions: int = 400) -> Accuracy:
    return Accuracy.from_counts(
        "reference",
        num_positions=num_positions,
        num_top1=num_top1,
        num_top5=num_positions,
        kl_mean=kl,
    )


def test_a_measurement_on_its_bounds_is_within_them() -> None:
    bounds = Bounds(min_top1=95.0, max_kl=0.01, max_bytes=1000)
    assert bounds.keeps(accuracy(380), 1000)
    assert not bounds.keeps(accuracy(379), 1000)
    assert not bounds.keeps(accuracy(380, 0.0101), 1000)
    assert not bounds.keeps(accuracy(380), 1001)


@pytest.mark.parametrize(
    "bounds", [Bounds(), Bounds(min_top1=0.0), Bounds(max_kl=9.0), Bounds(max_bytes=10**12)]
)
def test_what_is_not_asked_for_is_not_looked_at(bounds: Bounds) -> None:
    assert bounds.keeps(accuracy(0, 5.0), 10**9)


def test_the_guard_is_standard_errors_of_top_1() -> None:
    """At 96 % of 400 one is 0.98 points: 95 is within it, 95.1 is not."""
    error = 100 * math.sqrt(0.96 * 0.04 / 400)
    assert error == pytest.approx(0.98, abs=0.001)
    assert Bounds(min_top1=95.0).keeps(accuracy(384), 0, guard=GUARD)
    assert Bounds(min_top1=95.1).keeps(accuracy(384), 0)
    assert not Bounds(min_top1=95.1).keeps(accuracy(384), 0, guard=GUARD)
    assert Bounds(min_top1=94.1).keeps(accuracy(384), 0, guard=GUARD)
    assert Bounds(min_top1=100.0).keeps(accuracy(400), 0, guard=GUARD)  # nothing varies there


def test_the_guard_is_for_top_1_alone() -> None:
    assert Bounds(max_kl=0.01, max_bytes=10).keeps(accuracy(200), 10, guard=5.0)


@given(st.integers(0, 400), st.floats(0, 100), st.floats(0, 3))
def test_a_guard_only_refuses_more(num_top1: int, min_top1: float, guard: float) -> None:
    bounds, found = Bounds(min_top1=min_top1), accuracy(num_top1)
    assert bounds.keeps(found, 0) or not bounds.keeps(found, 0, guard=guard)


def test_an_unknown_divergence_is_within_no_bound() -> None:
    assert not Bounds(max_kl=9.0).keeps(accuracy(400, None), 0)
    assert Bounds(min_top1=95.0).keeps(accuracy(400, None), 0)


def test_which_bounds_are_of_accuracy() -> None:
    assert Bounds(min_top1=1.0).is_of_accuracy and Bounds(max_kl=0.0).is_of_accuracy
    assert not Bounds(max_bytes=1).is_of_accuracy and not Bounds().is_of_accuracy


def test_bounds_in_words() -> None:
    every = Bounds(min_top1=95.0, max_kl=0.05, max_bytes=1_200_000_000)
    assert str(every) == "top-1 >= 95 %, KL <= 0.05, weights <= 1200 MB"
    assert str(Bounds(min_top1=99.5)) == "top-1 >= 99.5 %"
    assert str(Bounds(max_kl=0.0)) == "KL <= 0"
    assert str(Bounds(max_bytes=1_500_000)) == "weights <= 1.5 MB"
    assert str(Bounds()) == ""
