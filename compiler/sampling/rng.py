"""A draw's definition: filters, and a uniform number from seed and position only.

Therefore an output does not depend on its batch, its slot, or the order of calls. Kernels of
targets must reproduce these tokens. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_GROUP = 64  # logits per maximum or sum
# Of the total: more than twice the error of NumPy's float32 exponential, 2.52 units (3e-7).
_ROUGH_ERROR = 1e-6
_SMALLEST_LOGIT = -744.0  # exp(_SMALLEST_LOGIT - _MARGIN) is 0 in float64
# Logits with equal float64 exponentials differ by less, by 1.1 for the smallest subnormal number.
_MARGIN = 2.0


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) from Philox4x32-10 (Salmon et al., 2011).

    The key is the seed and the counter is the position, both modulo 2^64.
    """
    counter = [position & _MASK, (position >> 32) & _MASK, 0, 0]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & _MASK,
            (first >> 32) ^ counter[3] ^ key[1],
            first & _MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return counter[0] / 2.0**32


def draw(
    line: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> int:
    """Return a token drawn from float32 logits ``[V]``. NaN is no logit.

    The steps are:

    1. Subtract the maximum and divide by ``temperature`` (above 0).
    2. Remove tokens below ``min_p`` times the maximum probability.
    3. Keep the ``top_k`` most probable tokens. Ties prefer lower ids.
    4. Keep the most probable tokens with a sum of at least ``top_p``.
    5. Return the token at which the cumulative probability, in order of ids, exceeds the uniform
       number of seed and position.
    """
    largest = np.fmax.reduce(line)
    with np.errstate(over="ignore"):  # a tiny temperature gives minus infinity, as intended
        scaled = (line - largest) / np.float32(temperature)
    number = uniform(seed, position)
    if top_k or min_p:
        return _draw_exactly(scaled, top_k, top_p, min_p, number)
    token = _draw_from_all(scaled, number) if top_p >= 1.0 else _draw_top_p(scaled, top_p, number)
    return _draw_exactly(scaled, 0, top_p, 0.0, number) if token is None else token


def _draw_exactly(scaled: np.ndarray, top_k: int, top_p: float, min_p: float, number: float) -> int:
    """Return the token. Compute float64 exponentials for the candidates only."""
    ids = _candidates(scaled, top_k, min_p)
    weights = np.exp(scaled[ids].astype(np.float64))
    is_possible = weights >= min_p if min_p > 0.0 else weights > 0.0
    if not is_possible.all():
        ids, weights = ids[is_possible], weights[is_possible]
    if 0 < top_k < len(ids):
        places = _first(weights, top_k)
        ids, weights = ids[places], weights[places]
    if top_p < 1.0:
        places = _nucleus(weights, top_p)
        ids, weights = ids[places], weights[places]
    return int(ids[_choose(weights, number)])


def _candidates(scaled: np.ndarray, top_k: int, min_p: float) -> np.ndarray:
    """Return ascending ids: all tokens that ``min_p`` and ``top_k`` may keep, and some more.

    ``scaled`` has a maximum near 0, and NaN is no candidate. At least ``top_k`` logits reach the
    ``top_k``-th largest maximum of strided groups.
    """
    bound = math.log(min_p) if min_p > 0.0 else _SMALLEST_LOGIT
    num_groups = len(scaled) // _GROUP
    if 0 < top_k <= num_groups:
        groups = scaled[: num_groups * _GROUP].reshape(_GROUP, num_groups)
        maxima = np.fmax(np.fmax.reduce(groups, axis=0), -np.inf)
        rank = num_groups - top_k
        bound = max(bound, float(np.partition(maxima, rank)[rank]))
    return np.flatnonzero(scaled >= bound - _MARGIN)


def _choose(weights: np.ndarray, number: float) -> int:
    """Return the index at which the cumulative weight exceeds the share ``number``."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)


def _draw_from_all(scaled: np.ndarray, number: float) -> int | None:
    """Return the token without filters, or None if rounding may change it.

    float32 exponentials find a group of consecutive ids, and float64 exponentials the token in it.
    float64 exponentials for the whole vocabulary would take most of the time.
    """
    rough = np.exp(scaled)
    whole = len(rough) // _GROUP * _GROUP
    sums = rough[:whole].reshape(-1, _GROUP).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(sums, rough[whole:].sum(dtype=np.float64)))
    target, margin = number * ends[-1], _ROUGH_ERROR * ends[-1]
    group = int(np.searchsorted(ends, target, side="right"))
    weights = np.exp(scaled[group * _GROUP : (group + 1) * _GROUP].astype(np.float64))
    bounds = np.cumsum(np.append(ends[group - 1] if group else 0.0, weights))
    index = int(np.searchsorted(bounds, target, side="right"))
    if not 0 < index < len(bounds):
        return None
    is_certain = bounds[index - 1] + margin < target < bounds[index] - margin
    return group * _GROUP + index - 1 if is_certain else None


def _draw_top_p(scaled: np.ndarray, top_p: float, number: float) -> int | None:
    """Return the token with ``top_p`` alone, or None if rounding may change it."""
    rough = np.exp(scaled)
    total = float(rough.sum(dtype=np.float64))
    if math.isnan(total) or not _ROUGH_ERROR < top_p < 1.0 - _ROUGH_ERROR:
        return None
    bound = (1.0 - top_p) * total / len(rough)  # as in _nucleus
    ids = np.flatnonzero(rough >= bound * (1.0 - _ROUGH_ERROR))
    weights = np.exp(scaled[ids].astype(np.float64))
    ranked = np.sort(weights)[::-1]
    excess = np.cumsum(ranked) - ranked - top_p * total
    if not (np.abs(excess) > _ROUGH_ERROR * total).all():
        return None
    places = _first(weights, max(1, int(np.count_nonzero(excess < 0.0))))
    return int(ids[places[_choose(weights[places], number)]])


def _first(weights: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the ``count`` largest weights, ascending. Ties prefer the first."""
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > threshold)
    equal = np.flatnonzero(weights == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(weights: np.ndarray, share: float) -> np.ndarray:
    """Return the indices of the largest weights that reach ``share`` of the sum, ascending."""
    total = float(weights.sum())
    # The weights below this bound have a smaller sum than the nucleus excludes.
    places = np.flatnonzero(weights >= (1.0 - share) * total / len(weights))
    candidates = weights[places]
    ranked = np.sort(candidates)[::-1]
    before = np.cumsum(ranked) - ranked
    count = max(1, int(np.count_nonzero(before < share * total)))
    return places[_first(candidates, count)] if count < len(places) else places


def log_probabilities(
    logits: ArrayLike, tokens: Sequence[int], num_top: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return for each row of ``logits [R, V]`` its token's natural log probability.

    Each entry also has the ``num_top`` most probable tokens with theirs, in descending order. Ties
    prefer lower ids.
    """
    found = []
    for line, token in zip(np.asarray(logits), tokens, strict=True):
        wide = line.astype(np.float64)
        wide -= np.fmax.reduce(wide)
        weights = np.exp(wide)
        total = weights.sum()
        wide -= np.log(np.nansum(weights) if np.isnan(total) else total)
        top = tuple((int(at), float(wide[at])) for at in _most_probable(wide, num_top))
        found.append((float(wide[token]), top))
    return found


def _most_probable(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the ``count`` largest values, in descending order."""
    if not count:
        return np.arange(0)
    ids = _candidates(values, count, 0.0)
    if len(ids) < count:  # minus infinity and NaN are the last
        return np.argsort(-values, kind="stable")[:count]
    if count < len(ids):
        ids = ids[_first(values[ids], count)]
    return ids[np.argsort(-values[ids], kind="stable")]
