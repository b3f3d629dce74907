"""What a model keeps between steps, described without a word on where or how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

PER_TOKEN, PER_SEQUENCE = "per_token", "per_sequence"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one operator remembers of a sequence: a name, a shape and a format.

    ``kind``: ``per_token`` (a row is added with every position: keys and values) or
    ``per_sequence`` (rewritten in place: a convolution window, a delta-rule matrix).
    ``shape``: of one position, or of one sequence. ``format``: the format asked for.
    ``window``: positions that must be kept (0: all).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    format: str
    window: int = 0

    def num_elements(self, num_positions: int) -> int:
        """Elements one sequence of ``num_positions`` needs."""
        count = 1
        for size in self.shape:
            count *= size
        if self.kind == PER_SEQUENCE:
            return count
        return count * (min(num_positions, self.window) if self.window else num_positions)
