"""What a step takes, learnt from the steps that were measured. Knows counts and times alone."""

from __future__ import annotations

from tilewright.runtime.scheduling.mixed_batch_cost import PassCost

_KEPT = 0.98
"""What is left of a measurement's weight after the next one of its kind."""
_MOST = 2.0
"""Times what was expected that a measurement counts at most: a hiccup is soon forgotten, and a
step that has become slower is believed after a few."""
_LEAST_SLOPE = 0.5
"""Of the mean of what a count took, that each more takes at the least where a line is careful: what
the host was slow to launch takes as long for any count, and says nothing of larger ones.
"""
_WARM = 3


class _Line:
    """``ms = first + each * count``, fitted to measurements of which the recent ones weigh more."""

    def __init__(self, *, is_careful: bool) -> None:
        """``is_careful``: while all counts were alike, others cost in proportion, else the same;
        and the line is never flat.
        """
        self._is_careful = is_careful
        self.num_measured = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.first = self.each = 0.0

    def at(self, count: float) -> float:
        """Milliseconds; 0 where nothing was measured."""
        return self.first + self.each * count

    def measure(self, count: float, ms: float) -> None:
        """One measurement of a part that was there: ``count`` is above 0."""
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


class StepCost:
    """Milliseconds of the two parts of a step: rows that decode, and tokens of prompts.

    ``passes``: of steps in which both share one pass over the weights.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all measured step times."""
        self._decode, self._prompts = _Line(is_careful=False), _Line(is_careful=True)
        self.passes = PassCost()

    def decode(self, num_rows: int) -> float:
        """Milliseconds of so many decode rows; 0 where none were measured yet."""
        return self._decode.at(num_rows) if num_rows else 0.0

    def prompts(self, num_tokens: float) -> float:
        """Milliseconds of so many tokens of prompts; 0 where none were measured yet."""
        return self._prompts.at(num_tokens) if num_tokens else 0.0

    def shared(self, num_rows: int, num_tokens: float) -> float | None:
        """Milliseconds of a pass that so many rows and tokens share; None where none was measured.

        One larger than those that were tried takes as much more as tokens alone do: in proportion
        to a small pass, most of whose time is the weights', it would never be tried.
        """
        a_row, a_token = self._decode.each, self._prompts.each
        return self.passes.at(num_rows, num_tokens, a_row=a_row, a_token=a_token)

    def tokens_within(self, ms: float) -> int | None:
        """How many tokens of prompts take no longer than ``ms``; None where that is not known."""
        line = self._prompts
        if not line.num_measured or line.each <= 0.0:
            return None
        return max(0, int((ms - line.first) / line.each))

    def measure(
        self, num_rows: int, num_tokens: float, ms: float, *, is_mixed: bool = False
    ) -> None:
        """A step of so many rows and tokens, in one pass if ``is_mixed``, took ``ms``."""
        if is_mixed and num_rows:
            self.passes.measure(num_rows, num_tokens, ms)
        elif num_tokens:
            rest = ms - self.decode(num_rows)
            if not num_rows or (rest > 0.0 and self._decode.num_measured):
                self._prompts.measure(num_tokens, rest)
        elif num_rows:
            self._decode.measure(num_rows, ms)


class StepMeter:
    """Tells a :class:`StepCost` how long steps take, from when they are given and read.

    Where the executable runs ahead, the time between two readings is that of what was waited for
    between them: the rows of the later step, and the tokens of prompts behind the rows that were
    read before.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._began = 0.0
        self._num_behind = 0.0

    def begin(self, now: float) -> None:
        """A step is given while none is under way."""
        self._began, self._num_behind = now, 0.0

    def read(
        self,
        num_rows: int,
        num_tokens: float,
        now: float,
        *,
        are_prompts_read: bool,
        is_read: bool,
        is_mixed: bool = False,
    ) -> None:
        """A step was read. ``is_read``: anything of it was waited for; ``are_prompts_read``:
        its prompts too; ``is_mixed``: they were one pass with its rows.
        """
        tokens = self._num_behind + (num_tokens if are_prompts_read else 0)
        self._num_behind = 0 if are_prompts_read else num_tokens + (0 if is_read else tokens)
        if not is_read:
            return
        self.cost.measure(num_rows, tokens, 1e3 * (now - self._began), is_mixed=is_mixed)
        self._began = now
