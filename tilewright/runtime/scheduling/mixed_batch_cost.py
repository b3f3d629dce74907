"""What a pass takes that prompts' tokens and rows that decode share: medians of those measured."""

from __future__ import annotations

import math
import statistics
from collections import deque

_KEPT = 9
"""Recent passes of about one size: a hiccup among them is not heard of."""
_IN_OCTAVE = 2
"""Sizes that are told apart between a number and twice as many."""


class _Size:
    """Passes of about so many rows and tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_KEPT)
        self.rows = self.tokens = self.ms = 0.0

    def add(self, rows: int, tokens: float, ms: float) -> None:
        self._recent.append((rows, tokens, ms))
        columns = zip(*self._recent, strict=True)
        self.rows, self.tokens, self.ms = map(statistics.median, columns)

    @property
    def count(self) -> float:
        """Rows and tokens together."""
        return self.rows + self.tokens


class PassCost:
    """Milliseconds of passes by their rows and by the weight of their tokens of prompts."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}

    def measure(self, num_rows: int, num_tokens: float, ms: float) -> None:
        """A pass of so many rows and tokens, of both at least one, took ``ms``."""
        key = _about(num_rows), _about(num_tokens)
        self._sizes.setdefault(key, _Size()).add(num_rows, num_tokens, ms)

    def at(
        self, num_rows: int, num_tokens: float, *, a_row: float = 0.0, a_token: float = 0.0
    ) -> float | None:
        """What a pass is expected to take; None where none was measured. Of a size that nobody has
        tried: what the nearest takes, and ``a_row`` and ``a_token`` more for each more of them;
        where ``a_token`` is not known (0), in proportion, but no less than the nearest.

        No more than a larger one, nor than a smaller one in proportion: so one that took long for
        once, and that nobody tries again, is not believed against others.
        """
        if not self._sizes:
            return None
        rows, tokens = _about(num_rows), _about(num_tokens)
        count = num_rows + num_tokens
        near = min(self._sizes, key=lambda each: abs(each[0] - rows) + abs(each[1] - tokens))
        found = self._sizes[near]
        in_proportion = found.ms * count / found.count
        if near == (rows, tokens):
            expected = in_proportion
        else:
            least, most = sorted((found.ms, in_proportion))
            more = a_row * (num_rows - found.rows) + a_token * (num_tokens - found.tokens)
            expected = min(max(found.ms + more, least), most) if a_token else most
        bounds = [each for (more, _), each in self._sizes.items() if more >= rows]
        return min([expected, *(each.ms * max(1.0, count / each.count) for each in bounds)])


def _about(count: float) -> int:
    return round(_IN_OCTAVE * math.log2(max(count, 1.0)))
