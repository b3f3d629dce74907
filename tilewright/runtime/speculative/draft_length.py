"""`DraftLength`: the draft token count with the limit output per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_KEPT = 0.99
"""Weight factor of an observation after each later observation."""
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0
"""Assumed acceptance of a draft token before observations, and its weight in observations."""
_PROBE, _MAX_PROBE, _PLAIN = 64, 1024, 256
"""Steps without drafts until a draft token measures again: after the first probe, and after many
rejected probes or at a cost that no acceptance can repay. Steps with drafts until a step without
drafts."""


class DraftLength:
    """Running acceptance by position. It chooses a length from the acceptance and the step time."""

    def __init__(
        self,
        max_drafts: int,
        decode_ms: Callable[[int], float],
        drafted_ms: Callable[[int], float] | None = None,
    ) -> None:
        """Take functions from rows to predicted milliseconds. 0: unknown.

        Args:
            max_drafts: Maximum draft tokens per request.
            decode_ms: Predicts steps without drafts.
            drafted_ms: Predicts steps with drafts. None: ``decode_ms``.
        """
        self._decode_ms, self._drafted_ms = decode_ms, drafted_ms or decode_ms
        self._weights = [_PRIOR_WEIGHT] * max_drafts
        self._sums = [_PRIOR_WEIGHT * _PRIOR ** (at + 1) for at in range(max_drafts)]
        self._num_off = self._num_on = 0
        self._probe, self._can_gain = _PROBE, True
        self.length = max_drafts

    @property
    def is_on(self) -> bool:
        """Whether the next step may have drafts."""
        return self.length > 0 or self._num_off >= self._wait

    @property
    def _wait(self) -> int:
        return self._probe if self._can_gain else _MAX_PROBE

    def acceptance(self, position: int) -> float:
        """Return the share of drafts whose first ``position + 1`` tokens were accepted."""
        return self._sums[position] / self._weights[position]

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Add a verified draft. An accepted token makes the next probe early again."""
        if num_accepted:
            self._probe = _PROBE
        for at in range(num_drafts):
            self._weights[at] = _KEPT * self._weights[at] + 1.0
            self._sums[at] = _KEPT * self._sums[at] + (at < num_accepted)

    def skip(self) -> None:
        """Count a step without drafts while they are off."""
        if not self.length:
            self._num_off += 1

    def choose(self, num_rows: int, lengths: Sequence[int]) -> int:
        """Return the maximum draft length for a step.

        Args:
            num_rows: Rows without drafts.
            lengths: Available draft lengths.
        """
        rates = [self._rate(num_rows, lengths, k, self.acceptance) for k in range(max(lengths) + 1)]
        self.length = max(range(len(rates)), key=lambda k: rates[k])
        self._can_gain = any(
            self._rate(num_rows, lengths, k, lambda _: 1.0) > rates[0] for k in range(1, len(rates))
        )
        if self.length:
            self._num_off, self._num_on = 0, self._num_on + 1
            if self._num_on >= _PLAIN:
                self._num_on = 0
                return 0
        elif self._num_off >= self._wait:
            self._num_off, self._probe = 0, min(2 * self._probe, _MAX_PROBE)
            return 1
        else:
            self._num_off += 1
        return self.length

    def _rate(
        self, num_rows: int, lengths: Sequence[int], limit: int, acceptance: Callable[[int], float]
    ) -> float:
        """Return expected tokens per millisecond."""
        cut = [min(length, limit) for length in lengths]
        tokens = num_rows + sum(acceptance(at) for size in cut for at in range(size))
        ms = (self._drafted_ms if limit else self._decode_ms)(num_rows + sum(cut))
        return tokens / ms if ms > 0 else tokens
