"""Batch statistics: the lines in the ASC24 baseline, with additional values."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.batch.engine import FinishedRequest

_TAIL = 0.05
"""Share of the rows that are the tail: the rows that finish last."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Engine progress at a row's end."""

    at: float
    num_steps: int
    num_decoded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A batch's last rows: seconds without other rows, and mean decode rows per step."""

    seconds: float
    mean_batch: float


@dataclass(slots=True)
class Meter:
    """Counts a run from loading to the last answer.

    Attributes:
        num_prompt, num_output: tokens in answered rows.
        ignored: rows per unknown key.
    """

    began: float = field(default_factory=time.perf_counter)
    num_answered: int = 0
    num_failed: int = 0
    num_prompt: int = 0
    num_output: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    _marks: list[_Mark] = field(default_factory=list)
    _ended: float = 0.0

    def take(
        self, ended: Sequence[FinishedRequest], *, num_steps: int = 0, num_decoded: int = 0
    ) -> None:
        """Count finished rows. ``num_decoded``: tokens from ``num_steps``."""
        self._ended = now = time.perf_counter()
        for each in ended:
            record = each.record
            self.num_answered += record.is_ok
            self.num_failed += not record.is_ok
            self.num_prompt += record.prompt_tokens
            self.num_output += record.completion_tokens
            self.ignored.update(each.ignored)
            if each.first_s is not None and each.total_s is not None:
                self.first_s.append(each.first_s)
                self.total_s.append(each.total_s)
            self._marks.append(_Mark(now, num_steps, num_decoded))

    @property
    def seconds(self) -> float:
        """The seconds from the beginning to the last row's end."""
        return max(self._ended - self.began, 1e-9)

    @property
    def mean_batch(self) -> float:
        """The mean decode rows per step."""
        return _ratio(self._marks[-1].num_decoded, self._marks[-1].num_steps) if self._marks else 0

    @property
    def tail(self) -> Tail | None:
        """The last rows, or None for less than a row."""
        at = round(len(self._marks) * (1 - _TAIL)) - 1
        if at < 0 or at + 1 >= len(self._marks):
            return None
        begin, end = self._marks[at], self._marks[-1]
        decoded, steps = end.num_decoded - begin.num_decoded, end.num_steps - begin.num_steps
        return Tail(seconds=end.at - begin.at, mean_batch=_ratio(decoded, steps))

    def values(self) -> dict[str, float]:
        """Return the statistics by name."""
        tail = self.tail
        found = {
            "rows": self.num_answered + self.num_failed,
            "failed": self.num_failed,
            "seconds": self.seconds,
            "requests_per_second": self.num_answered / self.seconds,
            "tokens_per_second": (self.num_prompt + self.num_output) / self.seconds,
            "output_tokens_per_second": self.num_output / self.seconds,
            "prompt_tokens": self.num_prompt,
            "output_tokens": self.num_output,
            "mean_batch": self.mean_batch,
        }
        if tail is not None:
            found |= {"tail_seconds": tail.seconds, "tail_mean_batch": tail.mean_batch}
        for name, times in (("ttft_ms", self.first_s), ("latency_ms", self.total_s)):
            if times:
                found[f"{name}_p50"] = 1e3 * percentile(times, 50)
                found[f"{name}_p99"] = 1e3 * percentile(times, 99)
        return found

    def lines(self) -> list[str]:
        """Return the statistics as text. The first four lines are of the ASC24 baseline."""
        total = self.num_prompt + self.num_output
        found = [
            f"Throughput: {self.num_answered / self.seconds:.2f} requests/s",
            f"Tokens/s: {total / self.seconds:.2f} tokens/s",
            f"Prompt_num_tokens: {self.num_prompt} tokens",
            f"Total_num_tokens: {total} tokens",
            f"Output tokens/s: {self.num_output / self.seconds:.2f} tokens/s "
            f"({self.num_output} in {self.seconds:.2f} s)",
        ]
        for name, times in (("TTFT", self.first_s), ("Latency", self.total_s)):
            if times:
                middle, high = (1e3 * percentile(times, share) for share in (50, 99))
                found.append(f"{name} from its slot: p50 {middle:,.0f} ms, p99 {high:,.0f} ms")
        if (tail := self.tail) is not None:
            share = 100 * tail.seconds / self.seconds
            said = f"Tail: the last {100 * _TAIL:.0f} % of rows took {tail.seconds:.2f} s, "
            said += f"{share:.1f} % of the time"
            found.append(f"{said}, {tail.mean_batch:.1f} rows a step" if tail.mean_batch else said)
        if self.mean_batch:
            found.append(f"Mean batch: {self.mean_batch:.1f} rows a step")
        return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` percent of ``values`` do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _ratio(count: float, by: float) -> float:
    return count / by if by else 0.0
