"""A draw's definition: filters, and a uniform number from seed and position only.

Therefore an output does not depend on its batch, its slot, or the order of calls. Kernels of
targets must reproduce these tokens. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_MASK = 0xFFFFFFFF
_ROUNDS = 10


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
    largest = np.nanmax(line)
    with np.errstate(over="ignore"):  # a tiny temperature gives minus infinity, as intended
        scaled = (line - largest) / np.float32(temperature)
    weights = np.exp(np.nan_to_num(scaled, nan=-np.inf).astype(np.float64))
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    kept = np.flatnonzero(weights)
    if 0 < top_k < len(kept):
        kept = kept[_first(weights[kept], top_k)]
    if top_p < 1.0:
        kept = kept[_nucleus(weights[kept], top_p)]
    cumulative = np.cumsum(weights[kept])
    target = uniform(seed, position) * cumulative[-1]
    at = int(np.searchsorted(cumulative, target, side="right"))
    return int(kept[min(at, len(kept) - 1)])


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
        wide -= np.nanmax(wide)
        wide -= np.log(np.nansum(np.exp(wide)))
        places = _first(wide, num_top) if 0 < num_top < len(wide) else np.arange(len(wide))
        places = places[np.argsort(-wide[places], kind="stable")][:num_top]
        found.append((float(wide[token]), tuple((int(at), float(wide[at])) for at in places)))
    return found
