"""A time model for mixed batches, from measured time medians."""

from __future__ import annotations

import math
import statistics
from collections import deque

_KEPT = 9
"""Recent measurements per size. The median ignores a hiccup."""
_IN_OCTAVE = 2
"""Number of size classes per doubling."""


class _Size:
    """Mixed batches with similar rows and tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_KEPT)
        self.rows = self.tokens = self.ms = 0.0

    def add(self, rows: int, tokens: float, ms: float) -> None:
        self._recent.append((rows, tokens, ms))
        columns = zip(*self._recent, strict=True)
        self.rows, self.tokens, self.ms = map(statistics.median, columns)

    @property
    def count(self) -> float:
        """Return the sum of rows and tokens."""
        return self.rows + self.tokens


class MixedBatchCost:
    """Mixed batch milliseconds by decode rows and weighted prefill tokens."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}

    def measure(self, num_rows: int, num_tokens: float, ms: float) -> None:
        """Add the time ``ms`` of a mixed batch with at least a decode token and a prefill token."""
        key = _about(num_rows), _about(num_tokens)
        self._sizes.setdefault(key, _Size()).add(num_rows, num_tokens, ms)

    def at(
        self, num_rows: int, num_tokens: float, *, a_row: float = 0.0, a_token: float = 0.0
    ) -> float | None:
        """Return the predicted milliseconds, or None without measurements.

        An unmeasured size costs the nearest measured time, plus ``a_row`` and ``a_token`` per
        further sequence and token. If ``a_token`` is 0 (unknown), the time is proportional, but
        never below the nearest.

        The prediction is limited by larger measured sizes, and by smaller sizes in proportion. An
        outlier that prevents further use is therefore corrected.
        """
        if not self._sizes:
            return None
        rows, tokens = _about(num_rows), _about(num_tokens)
        count = num_rows + num_tokens
        near = min(self._sizes, key=lambda each: abs(each[0] - rows) + abs(each[1] - tokens))
        size = self._sizes[near]
        in_proportion = size.ms * count / size.count
        if near == (rows, tokens):
            expected = in_proportion
        else:
            least, most = sorted((size.ms, in_proportion))
            more = a_row * (num_rows - size.rows) + a_token * (num_tokens - size.tokens)
            expected = min(max(size.ms + more, least), most) if a_token else most
        bounds = [each for (more, _), each in self._sizes.items() if more >= rows]
        return min([expected, *(bound.ms * max(1.0, count / bound.count) for bound in bounds)])


def _about(count: float) -> int:
    return round(_IN_OCTAVE * math.log2(max(count, 1.0)))
