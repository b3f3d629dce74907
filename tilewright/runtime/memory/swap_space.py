"""Allocator of host memory for the state of preempted requests. Counts bytes only."""

from __future__ import annotations

import heapq

from tilewright.compiler.targets.interface.step import SwapHandle


class SwapSpace:
    """Allocator for up to ``most_bytes`` bytes. The lowest free number is next."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._sizes: dict[SwapHandle, int] = {}
        self._free: list[int] = []

    def take(self, num_bytes: int) -> SwapHandle | None:
        """Allocate ``num_bytes``. Return None if they do not fit."""
        if self._num_bytes + num_bytes > self._most_bytes:
            return None
        number = heapq.heappop(self._free) if self._free else len(self._sizes)
        place = SwapHandle(number)
        self._sizes[place] = num_bytes
        self._num_bytes += num_bytes
        return place

    def give_back(self, place: SwapHandle) -> None:
        """Free an allocation for another request."""
        self._num_bytes -= self._sizes.pop(place)
        heapq.heappush(self._free, place)

    def forget(self) -> None:
        """Free all allocations."""
        self._sizes.clear()
        self._free.clear()
        self._num_bytes = 0
