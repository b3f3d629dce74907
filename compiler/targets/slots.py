"""Which of a fixed number of state slots are taken. Knows nothing of what a slot holds."""

from __future__ import annotations

import heapq

from tilewright.compiler.errors import RequestError
from tilewright.compiler.targets.base import StateHandle


def check_copy(num_positions: int, length: int) -> None:
    """Whether state that is rewritten in place can be copied: only as it is after ``length``.

    Raises:
        RequestError: for a shorter history.
    """
    if num_positions != length:
        raise RequestError(
            f"a copy of the first {num_positions} positions of a sequence of {length}; "
            f"allowed: all {length}, since its state cannot be cut back"
        )


class SlotPool:
    """Hands out the lowest free slot, so that the taken ones stay close together."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.num_slots = num_slots
        self.max_context = max_context
        self._free = list(range(num_slots))
        self._taken: set[int] = set()

    def reserve(self, num_positions: int) -> StateHandle:
        """Take a slot.

        Raises:
            RequestError: when the sequence is longer than a slot, or all slots are taken.
        """
        if not 0 < num_positions <= self.max_context:
            raise RequestError(
                f"a sequence of {num_positions} positions; allowed: 1 to {self.max_context}"
            )
        if not self._free:
            raise RequestError(f"all {self.num_slots} sequences are in use; remove one first")
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return StateHandle(slot)

    def free(self, handle: StateHandle) -> None:
        """Give a slot back."""
        self._taken.remove(handle)
        heapq.heappush(self._free, handle)

    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, handle: object) -> bool:
        return handle in self._taken
