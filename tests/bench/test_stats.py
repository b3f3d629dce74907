"""Known values of the statistics, and what must hold for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.bench.stats import iqr, mcnemar, median, quantile, spread, wilson_interval

FLOATS = st.floats(0.001, 1e9)


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        # R: binom::binom.confint(x, n, methods = "wilson"), and hand calculation.
        (0, 10, 0.0, 0.2775327998628892),
        (10, 10, 0.7224672001371106, 1.0),
        (5, 10, 0.2365930905, 0.7634069095),
        (81, 263, 0.2552960146, 0.3661840886),  # Newcombe 1998, table I: 0.2553, 0.3662
    ],
)
def test_wilson_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_ends_are_exact_and_nothing_known_is_everything() -> None:
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_88_and_91_percent_of_128_are_the_same_number() -> None:
    assert wilson_interval(113, 128)[1] > wilson_interval(116, 128)[0]
    assert wilson_interval(113, 128)[0] < 116 / 128 < wilson_interval(113, 128)[1]


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = wilson_interval(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    mirrored = wilson_interval(n - successes, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


@pytest.mark.parametrize("successes, n", [(-1, 5), (6, 5), (1, -1)])
def test_wilson_refuses(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, n)


@pytest.mark.parametrize(
    "b, c, p",
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (0, 5, 0.0625),  # 2 / 2**5
        (6, 16, 0.052479),  # binom.test(6, 22): 0.05248
        (3, 3, 1.0),
        (10, 1, 2 * 12 / 2**11),
    ],
)
def test_mcnemar_known_values(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p, abs=1e-6)
    assert mcnemar(c, b) == mcnemar(b, c)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_tail(b: int, c: int) -> None:
    n = b + c
    tail = sum(math.comb(n, i) for i in range(min(b, c) + 1))
    assert mcnemar(b, c) == min(1.0, 2 * tail / 2**n)


def test_mcnemar_of_large_counts_does_not_overflow() -> None:
    assert 0.0 <= mcnemar(2000, 100) < 1e-300
    assert mcnemar(2000, 2000) == 1.0
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 2)


def test_median_quantile_iqr_spread_known_values() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.25) == 1.75  # numpy.quantile
    assert iqr([1.0, 2.0, 3.0, 4.0]) == 1.5
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([0.0, 0.0]) == 0.0
    assert spread([5.0]) == 0.0


def test_nothing_has_no_median_and_zero_no_relative_spread() -> None:
    for function in (median, iqr, spread):
        with pytest.raises(ValueError, match="no values"):
            function([])
    with pytest.raises(ValueError, match="median of 0"):
        spread([-1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        quantile([1.0], 1.5)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_stays_between_and_ignores_order(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert min(values) * (1 - 1e-12) <= found <= max(values) * (1 + 1e-12)
    assert found == quantile(values[::-1], q)
