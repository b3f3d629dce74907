"""The few statistics that results are printed with: intervals, a paired test, medians, spreads.

Pure Python on counts and plain numbers; knows nothing of models or of where numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution: a two-sided 95 % interval."""


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


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1), linear between order statistics.

    Raises:
        ValueError: on no values or q out of range.

    Source: R. J. Hyndman, Y. Fan, "Sample quantiles in statistical packages" (1996), type 7 (the
    default of NumPy and R).
    """
    if not values:
        raise ValueError("a quantile of no values")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile's q is in [0, 1], got {q}")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    weight = place - below
    if weight == 0.0:
        return ordered[below]
    return ordered[below] * (1.0 - weight) + ordered[above] * weight


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones. ValueError on no values."""
    return quantile(values, 0.5)


def iqr(values: Sequence[float]) -> float:
    """The interquartile range, in the unit of the values. ValueError on no values."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def spread(values: Sequence[float]) -> float:
    """The range relative to the median: (max - min) / median; 0 where all values are equal.

    Raises:
        ValueError: on no values, or if they differ around a median of 0.
    """
    middle = median(values)
    width = max(values) - min(values)
    if width == 0:
        return 0.0
    if middle == 0:
        raise ValueError("the relative spread around a median of 0 has no value")
    return width / abs(middle)
