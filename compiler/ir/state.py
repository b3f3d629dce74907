"""Description of a model's state between steps, independent of storage."""

from __future__ import annotations

from dataclasses import dataclass

PER_TOKEN, PER_SEQUENCE = "per_token", "per_sequence"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """An operator's state for a sequence.

    Attributes:
        kind: ``per_token`` (keys and values, by position) or ``per_sequence`` (a convolution window
            or a delta-rule matrix, rewritten in place).
        shape: Shape for a position or for a sequence.
        format: Requested format.
        window: Retained positions. 0: all.
        value_format: Requested format for values in a KV cache. Empty: ``format``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    format: str
    window: int = 0
    value_format: str = ""

    def num_elements(self, num_positions: int) -> int:
        """Return the elements for a sequence with ``num_positions`` positions."""
        count = 1
        for size in self.shape:
            count *= size
        if self.kind == PER_SEQUENCE:
            return count
        return count * (min(num_positions, self.window) if self.window else num_positions)
