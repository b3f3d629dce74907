"""Timed steps of a single sequence, with the counts of distributed-llama.

The first prediction reads the last prompt token. End tokens do not stop a run. Only step time
counts. The caller tokenizes and uses the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.compiler.sampling.params import SamplingParams
    from tilewright.compiler.targets.interface.base import Executable


@dataclass(frozen=True, slots=True)
class NodesTiming:
    """Token counts and seconds of a prompt, as distributed-llama counts them.

    Seconds include steps only.
    """

    num_evaluated: int
    evaluated_s: float
    num_predicted: int
    predicted_s: float
    text: str
    num_batches: int
    sent_bytes: int = 0
    exchange_s: float = 0.0

    def lines(self) -> list[str]:
        """Return the lines that distributed-llama prints, and lines about collectives."""
        found = []
        for name, count, seconds in (
            ("Evaluation", self.num_evaluated, self.evaluated_s),
            ("Prediction", self.num_predicted, self.predicted_s),
        ):
            found.append(name)
            if name == "Evaluation":
                found.append(f"   nBatches: {self.num_batches}")
            rate = count / seconds if seconds > 0 else 0.0
            each = 1000 * seconds / count if count else 0.0
            found += [f"    nTokens: {count}", f"   tokens/s: {rate:.2f} ({each:.2f} ms/tok)"]
        if self.sent_bytes:
            each = 1000 * self.exchange_s / self.num_predicted
            kilobytes = self.sent_bytes / 1000 / self.num_predicted
            found += ["Exchange", f"       sent: {kilobytes:.1f} kB/tok"]
            found.append(f"       time: {each:.2f} ms/tok")
        return found


class Stepper:
    """Timed steps of a single sequence."""

    def __init__(self, executable: Executable, sampling: SamplingParams) -> None:
        from tilewright.compiler.targets.interface.step import Slot

        self._executable, self._slot, self._sampling = executable, Slot(0), sampling
        self._seconds = [0.0, 0.0]
        self._counts = [0, 0]
        self._then = 0.0, 0.0

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Run all prompt tokens except the last, which the first prediction reads."""
        from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Step

        self._executable.reset()
        slot, read = self._slot, tuple(tokens[:-1])
        self._executable.step(Step(edits=(OpenSlot(slot, self._sampling, tuple(tokens)),)))
        if read:
            self._timed(0, len(read), Step(prompts=(PrefillChunk(slot, 0, read),)))

    def predict(self, tokens: Sequence[int], limit: int) -> Any:
        """Yield the generated tokens until ``limit`` positions are filled."""
        from tilewright.compiler.targets.interface.step import PrefillChunk, Step

        self._then = self._exchanged()
        last = PrefillChunk(self._slot, len(tokens) - 1, (tokens[-1],), chooses=True)
        decode = Step(decode=(self._slot,))
        for position in range(len(tokens) - 1, limit):
            step = Step(prompts=(last,)) if position == len(tokens) - 1 else decode
            yield self._timed(1, 1, step)

    def counted(self, text: str) -> NodesTiming:
        """Return the timing of all steps with the bytes sent in predictions, and ``text``."""
        (bytes_now, seconds_now), (bytes_then, seconds_then) = self._exchanged(), self._then
        sent, seconds = bytes_now - bytes_then, seconds_now - seconds_then
        (evaluated, predicted), (first_s, rest_s) = self._counts, self._seconds
        return NodesTiming(evaluated, first_s, predicted, rest_s, text, 512, int(sent), seconds)

    def _exchanged(self) -> tuple[float, float]:
        """Return the bytes sent by this node, and the seconds in collectives. Zero on one node."""
        own = getattr(self._executable, "own", None)
        if own is None:
            return 0.0, 0.0
        found = own.exchanged()
        return float(found.num_bytes), found.nanoseconds / 1e9

    def _timed(self, phase: int, count: int, step: Any) -> int | None:
        began = time.perf_counter()
        parts = self._executable.step(step).parts
        token = parts[0].read().tokens[0] if parts else None
        self._seconds[phase] += time.perf_counter() - began
        self._counts[phase] += count
        return token
