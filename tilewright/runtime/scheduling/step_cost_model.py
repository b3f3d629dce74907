"""A model for step times, fitted to measured steps. Inputs are counts and times only."""

from __future__ import annotations

from tilewright.runtime.scheduling.mixed_batch_cost import MixedBatchCost

_KEPT = 0.98
"""Weight factor of a measurement after each later measurement."""
_MOST = 2.0
"""Maximum ratio to the expected time for a measurement. A hiccup has little effect, and a lasting
slowdown is learned after a few steps.
"""
_LEAST_SLOPE = 0.5
"""Minimum slope of a careful line, relative to the mean time per count. Launch overhead is constant
and does not predict larger counts.
"""
_WARM = 3


class _LinearFit:
    """A linear fit ``ms = first + each * count`` with larger weights for recent measurements."""

    def __init__(self, *, is_careful: bool) -> None:
        """Create a fit. If ``is_careful``, the line is never flat, and equal counts imply
        proportional cost.

        Otherwise equal counts imply a constant cost.
        """
        self._is_careful = is_careful
        self.num_measured = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.first = self.each = 0.0

    def at(self, count: float) -> float:
        """Return milliseconds. 0 without measurements."""
        return self.first + self.each * count

    def measure(self, count: float, ms: float) -> None:
        """Add a measurement. ``count`` is positive."""
        if self.num_measured >= _WARM:
            ms = min(ms, _MOST * self.at(count))
        self.num_measured += 1
        self._weight = self._weight * _KEPT + 1.0
        self._x = self._x * _KEPT + count
        self._y = self._y * _KEPT + ms
        self._xx = self._xx * _KEPT + count * count
        self._xy = self._xy * _KEPT + count * ms
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        in_proportion = mean_y / mean_x
        if spread > 1e-3 * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
            least = _LEAST_SLOPE * in_proportion if self._is_careful else 0.0
            self.each = min(max(slope, least), in_proportion)
        else:
            self.each = in_proportion if self._is_careful else 0.0
        self.first = mean_y - self.each * mean_x


class StepCostModel:
    """Predicted milliseconds for the two parts of a step: decode rows and prefill tokens.

    Steps with drafts have a separate fit: they do not start before the previous output is read.
    ``passes`` predicts mixed batches.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard all measured step times."""
        self._decode, self._prompts = _LinearFit(is_careful=False), _LinearFit(is_careful=True)
        self._drafted = _LinearFit(is_careful=False)
        self.passes = MixedBatchCost()

    def decode(self, num_rows: int, *, has_drafts: bool = False) -> float:
        """Return milliseconds for ``num_rows`` decode rows. 0 without measurements."""
        fit = self._drafted if has_drafts else self._decode
        return fit.at(num_rows) if num_rows else 0.0

    def prompts(self, num_tokens: float) -> float:
        """Return milliseconds for ``num_tokens`` prefill tokens. 0 without measurements."""
        return self._prompts.at(num_tokens) if num_tokens else 0.0

    def shared(self, num_rows: int, num_tokens: float) -> float | None:
        """Return milliseconds for a mixed batch, or None without measurements.

        Beyond measured sizes, only the cost per token is added. A proportional prediction from a
        small batch would include its weight reads, and larger batches would never be tried.
        """
        a_row, a_token = self._decode.each, self._prompts.each
        return self.passes.at(num_rows, num_tokens, a_row=a_row, a_token=a_token)

    def tokens_within(self, ms: float) -> int | None:
        """Return the prefill token count within ``ms``, or None if unknown."""
        line = self._prompts
        if not line.num_measured or line.each <= 0.0:
            return None
        return max(0, int((ms - line.first) / line.each))

    def measure(
        self,
        num_rows: int,
        num_tokens: float,
        ms: float,
        *,
        is_mixed: bool = False,
        has_drafts: bool = False,
    ) -> None:
        """Add a step's time ``ms``.

        Args:
            num_rows: Decode rows.
            num_tokens: Prefill tokens.
            ms: Time in milliseconds.
            is_mixed: Rows and tokens were a mixed batch.
            has_drafts: Some rows were drafts.
        """
        fit = self._drafted if has_drafts else self._decode
        if is_mixed and num_rows:
            self.passes.measure(num_rows, num_tokens, ms)
        elif num_tokens:
            rest = ms - self.decode(num_rows, has_drafts=has_drafts)
            if not num_rows or (rest > 0.0 and fit.num_measured):
                self._prompts.measure(num_tokens, rest)
        elif num_rows:
            fit.measure(num_rows, ms)


class StepTimer:
    """Measures steps for a :class:`StepCostModel`, from their launch and read times.

    With async scheduling, the time between two reads belongs to the work waited for between them:
    rows of the later step, and prefill tokens launched after the previously read rows.
    """

    def __init__(self, cost: StepCostModel) -> None:
        self.cost = cost
        self._began = 0.0
        self._num_behind = 0.0
        self._has_capture = False

    def begin(self, now: float) -> None:
        """Record a launch without a step in flight."""
        self._began, self._num_behind, self._has_capture = now, 0.0, False

    def read(
        self,
        num_rows: int,
        num_tokens: float,
        now: float,
        *,
        are_prompts_read: bool,
        is_read: bool,
        is_mixed: bool = False,
        has_drafts: bool = False,
        has_capture: bool = False,
    ) -> None:
        """Record a read step.

        Args:
            num_rows: Decode rows.
            num_tokens: Prefill tokens.
            now: Time in seconds.
            are_prompts_read: Prefill results were also read.
            is_read: Any result was read.
            is_mixed: Rows and tokens were a mixed batch.
            has_drafts: Some rows were drafts.
            has_capture: A graph was captured since the previous call. The time until the next read
                is not measured.
        """
        tokens = self._num_behind + (num_tokens if are_prompts_read else 0)
        self._num_behind = 0 if are_prompts_read else num_tokens + (0 if is_read else tokens)
        self._has_capture |= has_capture
        if not is_read:
            return
        ms, how = 1e3 * (now - self._began), {"is_mixed": is_mixed, "has_drafts": has_drafts}
        if not self._has_capture:
            self.cost.measure(num_rows, tokens, ms, **how)
        self._began, self._has_capture = now, False
