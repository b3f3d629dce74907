"""Pooling: converts a prompt's final hidden states to a vector. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.compiler.targets.interface.step import Pooled

if TYPE_CHECKING:
    import numpy as np

MEAN, LAST = "mean", "last"
POOLINGS = (MEAN, LAST)


@dataclass(slots=True)
class Pooling:
    """A prompt's vector, made from pooled chunks.

    Attributes:
        kind: ``mean`` over all positions, or the ``last`` position.
        vector: Unit vector, float32 ``[hidden]``. None before the last chunk. Zeros stay zeros.
    """

    kind: str
    vector: np.ndarray | None = None
    _chunks: list[tuple[int, Pooled]] = field(default_factory=list)

    def needs(self, *, is_last: bool) -> bool:
        """Return whether a chunk has to pool."""
        return is_last or self.kind == MEAN

    def take(self, start: int, pooled: Pooled, num_tokens: int) -> bool:
        """Add a chunk at ``start``. Return whether it ends the prompt.

        A prompt that lost its state is computed again: later chunks are dropped first.
        """
        self._chunks = [chunk for chunk in self._chunks if chunk[0] < start]
        self._chunks.append((start, pooled))
        if start + pooled.count < num_tokens:
            return False
        total = pooled.last.astype("f8")
        if self.kind == MEAN:
            total = pooled.total.astype("f8")
            for _, chunk in self._chunks[:-1]:
                total += chunk.total
            total /= num_tokens
        self.vector = normalized(total)
        self._chunks.clear()
        return True

    @property
    def is_number(self) -> bool:
        """Whether every value of the vector is finite."""
        return self.vector is not None and bool((abs(self.vector) < float("inf")).all())


def normalized(values: np.ndarray) -> np.ndarray:
    """Return the unit vector in float32."""
    wide = values.astype("f8")
    length = float((wide * wide).sum()) ** 0.5
    scaled: np.ndarray = (wide / length if length else wide).astype("f4")
    return scaled
