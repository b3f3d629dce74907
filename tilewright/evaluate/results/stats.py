"""The few statistics that results are printed with: intervals, paired tests, ranks, spreads.

Pure Python on counts and plain numbers; knows nothing of models or of where numbers come from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution: a two-sided 95 % interval."""

MIN_ROUNDS = 3
"""Below three rounds `paired_ratio` gives no interval: one difference between two rounds says too
little about the noise."""

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def wilson_interval(successes: int, n: int, *, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, as fractions in [0, 1].

    Unlike the normal approximation it stays in range and is right at 0 and n successes. With no
    trial nothing is known: (0, 1).

    Raises:
        ValueError: if not 0 <= successes <= n.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927); without continuity correction.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"need 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    shrink = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1.0 - share) / n + z * z / (4 * n * n)) / shrink
    # At the ends the bound is the share itself; the formula only reaches it up to rounding.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def mcnemar(b: int, c: int) -> float:
    """The exact two-sided p of McNemar's test on the two discordant counts.

    Args:
        b: positions that only the first of the two got right.
        c: positions that only the second got right.

    Returns:
        p of the sign test that b and c come from a fair coin: twice the smaller binomial tail, at
        most 1; and 1 where the two never differ.

    Raises:
        ValueError: if a count is negative.

    Source: Q. McNemar, Psychometrika 12 (1947), in the exact binomial form, which needs no large
    b + c.
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
    """The 97.5 % quantile of Student's t distribution, good to three decimals.

    Raises:
        ValueError: below one degree of freedom.

    Source: the table that every textbook prints for 1 to 30 degrees of freedom; beyond, the first
    two terms of M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
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
    """The mean of one value or more, and its standard error, the values taken as independent; None
    in its place for a single value, which shows no noise. ValueError on no values.
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
    """The mean of rounds and its 95 % interval by Student's t; None in its place below
    `MIN_ROUNDS`. ValueError on no values.
    """
    mean, error = mean_and_error(values)
    if error is None or len(values) < MIN_ROUNDS:
        return mean, None
    half = t_quantile_95(len(values) - 1) * error
    return mean, (mean - half, mean + half)


def discordant(base: Sequence[bool], ours: Sequence[bool]) -> tuple[int, int]:
    """Count the positions where only ``base`` was right, and those where only ``ours`` was.

    Raises:
        ValueError: if the two are of unequal lengths.
    """
    differing = [one for one, other in zip(base, ours, strict=True) if one != other]
    return sum(differing), len(differing) - sum(differing)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times larger one series is than the other, position by position or round by round.

    Attributes:
        ratio: the geometric mean of the rounds' ratios, or the ratio of two means.
        interval: 95 %, two-sided; None where there are too few rounds for one.
        num_rounds: the rounds or positions that were compared.
        differs: whether the interval leaves out 1; False where there is no interval.
    """

    ratio: float
    interval: tuple[float, float] | None
    num_rounds: int
    differs: bool


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """``ours / theirs`` over rounds in which both were measured close together.

    A machine drifts from round to round, and takes both values of a round along; their ratio does
    not drift. Of unequal numbers of rounds, the common first ones count.

    Raises:
        ValueError: if no round is common, or a value is not finite and above 0.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908), on differences in pairs,
    here of logarithms; P. J. Fleming, J. J. Wallace, "How not to lie with statistics", CACM 29
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
    """The ratio of two means over the same positions; None where the second mean is 0.

    Source: W. G. Cochran, "Sampling Techniques" (1977), chapter 6: the large-sample variance of a
    ratio of paired means, positions taken as independent.
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
    except OverflowError:  # absurd rounds of a file that was edited by hand
        return math.inf


@dataclass(frozen=True, slots=True)
class Rank:
    """One value's place in a descending order.

    Attributes:
        index: where it stands in the values that were ranked.
        best, worst: the ranks it may have, from 1: it is below every value that is larger beyond
            the noise and above every value that is smaller beyond it.
    """

    index: int
    best: int
    worst: int


def rank_groups(values: Sequence[float], errors: Sequence[float]) -> list[Rank]:
    """The values in descending order, equal ones as given, with what that order rests on.

    Two values can be told apart if they differ by more than 1.96 standard errors of their
    difference, taken as independent. Neighbours are not enough to know: between two precise values
    a vague one may stand that differs from neither. Hence ``best`` and ``worst``.

    Args:
        values: finite.
        errors: their standard errors, in the same unit; infinite where unknown.

    Raises:
        ValueError: on unequal lengths, a value that is not finite, or an error that is below 0.
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
    """The range relative to the median: (max - min) / median; 0 where all values are equal.

    Raises:
        ValueError: on no values, or if they differ around a median of 0.
    """
    middle = statistics.median(values)
    width = max(values) - min(values)
    if width == 0:
        return 0.0
    if middle == 0:
        raise ValueError("the relative spread around a median of 0 has no value")
    return width / abs(middle)
