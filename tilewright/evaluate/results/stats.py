"""Statistics for results: intervals, paired tests, ranks and spreads.

Pure Python on numbers. Excludes models and the numbers' source.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""``0.975`` quantile of the standard normal distribution, for a two-sided 95 % interval."""

MIN_ROUNDS = 3
"""Minimum number of rounds for an interval from `paired_ratio`. Two rounds show too little
noise.
"""

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the Wilson score interval for a proportion, as fractions in ``[0, 1]``.

    Unlike the normal approximation, the interval stays in range and is correct at both
    ends. Without trials, the result is ``(0, 1)``.

    Raises:
        ValueError: ``successes`` is not within ``0 .. n``.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927); without continuity correction.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    z, share = Z_95, successes / n
    shrink = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1.0 - share) / n + z * z / (4 * n * n)) / shrink
    # At the ends the bound equals the share, which the formula reaches up to rounding only.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p of McNemar's test for two discordant counts.

    This is the sign test for b and c from a fair coin: twice the smaller binomial tail, at most 1.
    With ``b = c = 0``, p is 1.

    Args:
        b: Positions correct in the first run only.
        c: Positions correct in the second run only.

    Raises:
        ValueError: A count is negative.

    Source: Q. McNemar, Psychometrika 12 (1947), in the exact binomial form, valid for small b + c.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts must not be negative, got b={b}, c={c}")
    n = b + c
    term = tail = 1
    for i in range(min(b, c)):
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)


def t_quantile_95(num_freedoms: int) -> float:
    """Return the ``0.975`` quantile of Student's t distribution, accurate to three decimals.

    Raises:
        ValueError: ``num_freedoms`` is below 1.

    Source: textbook table for up to 30 degrees of freedom; beyond, the first two terms in M.
    Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    if num_freedoms < 1:
        raise ValueError(f"Student's t needs a degree of freedom, got {num_freedoms}")
    if num_freedoms <= len(_T_95):
        return _T_95[num_freedoms - 1]
    z = Z_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / num_freedoms + second / num_freedoms**2


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error for independent values. The error is None for a single
    value.

    Raises:
        ValueError: There are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("a mean of no values")
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def mean_interval(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Return the mean and its 95 % interval by Student's t. The interval is None below `MIN_ROUNDS`
    values.

    Raises:
        ValueError: There are no values.
    """
    mean, error = mean_and_error(values)
    if error is None or len(values) < MIN_ROUNDS:
        return mean, None
    half = t_quantile_95(len(values) - 1) * error
    return mean, (mean - half, mean + half)


def discordant(base: Sequence[bool], ours: Sequence[bool]) -> tuple[int, int]:
    """Return the number of positions correct in ``base`` only, and in ``ours`` only.

    Raises:
        ValueError: The lengths differ.
    """
    differing = [one for one, other in zip(base, ours, strict=True) if one != other]
    return sum(differing), len(differing) - sum(differing)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio between two series, by position or round.

    Attributes:
        ratio: Geometric mean of the rounds' ratios, or ratio of two means.
        interval: Two-sided 95 % interval. None: too few rounds.
        num_rounds: Number of rounds or positions.
        differs: The interval excludes 1. False without an interval.
    """

    ratio: float
    interval: tuple[float, float] | None
    num_rounds: int
    differs: bool


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ``ours / theirs`` over rounds in which both were measured at about the same time.

    A machine drifts between rounds, but the ratio within a round does not. With unequal numbers of
    rounds, the first common rounds count.

    Raises:
        ValueError: There is no common round, or a value is not finite or not above 0.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908), for paired differences,
    here in logarithms; P. J. Fleming, J. J. Wallace, "How not to lie with statistics", CACM 29
    (1986), for the geometric mean.
    """
    pairs = list(zip(ours, theirs, strict=False))
    if not pairs:
        raise ValueError("a ratio of no rounds")
    for value in (*ours, *theirs):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a ratio needs finite values above 0, got {value}")
    mean, interval = mean_interval([math.log(mine) - math.log(other) for mine, other in pairs])
    if interval is None:
        return Ratio(_exp(mean), None, len(pairs), False)
    low, high = interval
    return Ratio(_exp(mean), (_exp(low), _exp(high)), len(pairs), not low <= 0 <= high)


def mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """Return the ratio of two means over the same positions. None: the second mean is ``0``.

    Source: W. G. Cochran, "Sampling Techniques" (1977), chapter 6: large-sample variance for a
    ratio of paired means with independent positions.
    """
    count = len(ours)
    mean = math.fsum(theirs) / count
    if mean == 0:
        return None
    ratio = math.fsum(ours) / count / mean
    rests = [(one - ratio * other) / mean for one, other in zip(ours, theirs, strict=True)]
    half = Z_95 * (mean_and_error(rests)[1] or 0.0)
    return Ratio(ratio, (ratio - half, ratio + half), count, abs(ratio - 1) > half)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # extreme rounds in a manually edited file
        return math.inf


@dataclass(frozen=True, slots=True)
class Rank:
    """A value's rank in descending order.

    Attributes:
        index: Index in the input.
        best, worst: Possible rank range, from 1. The value is below all significantly larger
            values and above all significantly smaller values.
    """

    index: int
    best: int
    worst: int


def rank_groups(values: Sequence[float], errors: Sequence[float]) -> list[Rank]:
    """Return the values in descending order with their possible ranks. Equal values keep their
    order.

    Two values are distinguishable if they differ by more than ``Z_95`` standard errors of their
    difference, with independent errors. Neighbors are not sufficient: an imprecise value between
    two precise values may differ from neither.

    Args:
        values: Finite numbers.
        errors: Standard errors in the same unit. Infinite: unknown.

    Raises:
        ValueError: Lengths differ, a value is not finite, or an error is negative.
    """
    for value, error in zip(values, errors, strict=True):
        if not math.isfinite(value) or math.isnan(error) or error < 0:
            raise ValueError(f"cannot rank {value} with a standard error of {error}")
    order = sorted(range(len(values)), key=lambda i: -values[i])

    def is_above(i: int, j: int) -> bool:
        return values[i] - values[j] > Z_95 * math.hypot(errors[i], errors[j])

    return [
        Rank(
            index=i,
            best=1 + sum(is_above(j, i) for j in order),
            worst=len(order) - sum(is_above(i, j) for j in order),
        )
        for i in order
    ]


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / median, or ``0`` if all values are equal.

    Raises:
        ValueError: There are no values, or values differ around a median of ``0``.
    """
    middle = statistics.median(values)
    width = max(values) - min(values)
    if width == 0:
        return 0.0
    if middle == 0:
        raise ValueError("the relative spread around a median of 0 has no value")
    return width / abs(middle)
