"""Known values of the statistics, and what must hold for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.evaluate.results.stats import (
    mcnemar,
    mean_ratio,
    paired_ratio,
    rank_groups,
    spread,
    t_quantile_95,
    wilson_interval,
)

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


def test_spread_known_values() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([0.0, 0.0]) == 0.0
    assert spread([5.0]) == 0.0


def test_nothing_has_no_spread_and_zero_no_relative_one() -> None:
    with pytest.raises(ValueError, match="no median"):
        spread([])
    with pytest.raises(ValueError, match="median of 0"):
        spread([-1.0, 0.0, 1.0])


def t_tail(t: float, num_freedoms: int) -> float:
    """P(T > t), t >= 0, of Student's t by Simpson's rule on the density from 0 to t."""
    half = num_freedoms / 2
    log_scale = math.lgamma(half + 0.5) - math.lgamma(half) - 0.5 * math.log(math.pi * 2 * half)

    def density(x: float) -> float:
        return math.exp(log_scale - (half + 0.5) * math.log1p(x * x / num_freedoms))

    n = 2000
    inner = sum((4 if i % 2 else 2) * density(t * i / n) for i in range(1, n))
    return 0.5 - (density(0.0) + inner + density(t)) * t / n / 3


@pytest.mark.parametrize("num_freedoms", [*range(1, 34), 40, 60, 120, 1000])
def test_t_quantiles_leave_2_5_percent_above(num_freedoms: int) -> None:
    found = t_quantile_95(num_freedoms)
    assert t_tail(found + 0.0007, num_freedoms) < 0.025 < t_tail(found - 0.0007, num_freedoms)


def test_t_quantiles_have_no_step_and_no_zeroth() -> None:
    found = [t_quantile_95(n) for n in range(1, 200)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert t_quantile_95(10**9) == pytest.approx(1.96, abs=1e-4)
    with pytest.raises(ValueError, match="freedom"):
        t_quantile_95(0)


def test_a_paired_ratio_by_hand() -> None:
    """Ratios 1, 1.1, 1.21: logs 0, L, 2 L with mean L, deviation L, half = 4.303 L / sqrt 3."""
    found = paired_ratio([7.0, 11.0, 24.2], [7.0, 10.0, 20.0])
    assert found.ratio == pytest.approx(1.1)
    assert found.interval == pytest.approx((1.1 ** (1 - 2.484338), 1.1 ** (1 + 2.484338)))
    assert (found.num_rounds, found.differs) == (3, False)


def test_a_ratio_sees_through_drift_that_both_share() -> None:
    drift, steps = [100.0, 70.0, 130.0, 90.0], [1.02, 1.03, 1.02, 1.03]
    found = paired_ratio([each * step for each, step in zip(drift, steps, strict=True)], drift)
    assert found.differs
    assert found.interval is not None
    assert 1.01 < found.interval[0] < found.ratio < found.interval[1] < 1.04


def test_few_rounds_have_no_interval_and_prove_nothing() -> None:
    for n in (1, 2):
        found = paired_ratio([2.0] * n, [1.0] * 5)
        assert (found.ratio, found.num_rounds) == (pytest.approx(2.0), n)
        assert (found.interval, found.differs) == (None, False)
    assert paired_ratio([2.0] * 3, [1.0] * 5).differs
    assert not paired_ratio([2.0] * 3, [2.0] * 3).differs


@pytest.mark.parametrize("ours, theirs", [([], [1.0]), ([1.0, 0.0], [1.0]), ([1.0], [math.nan])])
def test_no_ratio_of_nothing_or_of_no_speeds(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="ratio"):
        paired_ratio(ours, theirs)


def test_an_absurd_ratio_is_infinite_and_no_crash() -> None:
    found = paired_ratio([1e300, 1e-300, 1e300], [1e-300, 1e300, 1e-300])
    assert found.interval == (0.0, math.inf)
    assert not found.differs


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=3, max_size=12), st.integers(0, 3))
def test_a_ratio_mirrors_and_ignores_what_is_not_common(
    rounds: list[tuple[float, float]], num_more: int
) -> None:
    ours, theirs = [mine for mine, _ in rounds], [other for _, other in rounds]
    found, mirrored = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert found == paired_ratio(ours + [5.0] * num_more, theirs)
    assert found.differs == mirrored.differs
    assert found.interval is not None and mirrored.interval is not None
    assert 1 / found.ratio == pytest.approx(mirrored.ratio)
    if found.interval[0] > 1e-300 and found.interval[1] < 1e300:
        assert 1 / found.interval[0] == pytest.approx(mirrored.interval[1])
    assert found.interval[0] <= found.ratio <= found.interval[1]


def test_a_vague_value_between_precise_ones_is_tied_with_both() -> None:
    found = rank_groups([1.0, 10.0, 5.0], [0.1, 0.1, 4.0])
    assert [each.index for each in found] == [1, 2, 0]
    assert [(each.best, each.worst) for each in found] == [(1, 2), (1, 3), (2, 3)]


def test_a_vague_value_further_down_shows_in_the_rank() -> None:
    """10 and 9 differ, as neighbours; but 8.5 may be above both."""
    found = rank_groups([10.0, 9.0, 8.5], [0.1, 0.1, 4.0])
    assert [(each.best, each.worst) for each in found] == [(1, 2), (2, 3), (1, 3)]


def test_ranks_at_the_limit_and_without_errors() -> None:
    """1.96 sqrt(3**2 + 4**2) = 9.8."""
    assert rank_groups([9.79, 0.0], [3.0, 4.0])[0].worst == 2
    assert rank_groups([9.81, 0.0], [3.0, 4.0])[0].worst == 1
    assert rank_groups([1.0, 0.0], [0.0, 0.0])[0].worst == 1
    equal = rank_groups([2.0, 2.0], [0.0, 0.0])
    assert [(each.index, each.best, each.worst) for each in equal] == [(0, 1, 2), (1, 1, 2)]
    assert rank_groups([1e9, 0.0], [math.inf, 0.0])[0].worst == 2
    assert rank_groups([], []) == []


@pytest.mark.parametrize("value, error", [(math.nan, 1.0), (math.inf, 1.0), (1, -1), (1, math.nan)])
def test_ranks_refuse(value: float, error: float) -> None:
    with pytest.raises(ValueError, match="rank"):
        rank_groups([value], [error])
    with pytest.raises(ValueError, match="shorter"):
        rank_groups([1.0, 2.0], [1.0])


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), max_size=15))
def test_ranks_hold_the_place_and_say_who_is_apart(items: list[tuple[int, int]]) -> None:
    values, errors = [float(value) for value, _ in items], [float(error) for _, error in items]
    found = rank_groups(values, errors)
    assert sorted(each.index for each in found) == list(range(len(items)))
    for place, each in enumerate(found, start=1):
        assert 1 <= each.best <= place <= each.worst <= len(items)
        tied = [
            other
            for other in range(len(items))
            if abs(values[other] - values[each.index])
            <= 1.959963984540054 * math.sqrt(errors[other] ** 2 + errors[each.index] ** 2)
        ]
        assert each.worst - each.best + 1 == len(tied)
        if place < len(found):
            assert values[each.index] >= values[found[place].index]


def test_the_interval_of_a_ratio_covers_it() -> None:
    """Of 400 samples of correlated pairs whose means stand 1.1 to 1, about 95 % cover that."""
    generator = torch.Generator().manual_seed(0)
    covered, widths = 0, []
    for _ in range(400):
        shared, own = torch.rand(2, 300, generator=generator) + 0.5
        theirs = 0.8 * shared + 0.2 * own
        ours = 1.1 * shared * (1 + 0.3 * (torch.rand(300, generator=generator) - 0.5))
        found = mean_ratio(ours.tolist(), theirs.tolist())
        assert found is not None and found.interval is not None
        low, high = found.interval
        covered += low <= 1.1 <= high
        widths.append(high - low)
    assert 368 <= covered <= 392
    unpaired = 2 * 1.96 * 1.1 * math.sqrt(2 / 12 / 300)
    assert max(widths) < 0.6 * unpaired, "pairing must pay"
