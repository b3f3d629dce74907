"""What a search must keep to, and whether a measurement does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.compiler.bench.record import Accuracy

GUARD = 1.0
"""Standard errors that top-1 keeps above its bound on the text that is searched on: the cheapest
of many configurations that just meet a bound has been lucky there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Top-1 in percent, KL in nats, bytes of the weights as the target holds them."""

    min_top1: float | None = None
    max_kl: float | None = None
    max_bytes: int | None = None

    @property
    def is_of_accuracy(self) -> bool:
        """Whether accuracy is bounded, so that speed is what is looked for."""
        return self.min_top1 is not None or self.max_kl is not None

    def keeps(self, accuracy: Accuracy, num_bytes: int, *, guard: float = 0.0) -> bool:
        """Whether a measurement is within all bounds, top-1 by so many standard errors."""
        share = accuracy.num_top1 / accuracy.num_positions
        error = guard * math.sqrt(share * (1 - share) / accuracy.num_positions)
        return (
            (self.min_top1 is None or 100 * (share - error) >= self.min_top1)
            and (self.max_kl is None or _is_within(accuracy.kl_mean, self.max_kl))
            and (self.max_bytes is None or num_bytes <= self.max_bytes)
        )

    def __str__(self) -> str:
        parts = []
        if self.min_top1 is not None:
            parts.append(f"top-1 >= {self.min_top1:g} %")
        if self.max_kl is not None:
            parts.append(f"KL <= {self.max_kl:g}")
        if self.max_bytes is not None:
            parts.append(f"weights <= {self.max_bytes / 1e6:g} MB")
        return ", ".join(parts)


def _is_within(kl: float | None, most: float) -> bool:
    """An unknown divergence is within nothing."""
    return kl is not None and kl <= most
