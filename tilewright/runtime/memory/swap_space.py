"""Places in host memory for the state of requests that lost their slots. Knows numbers alone."""

from __future__ import annotations

import heapq

from tilewright.compiler.targets.interface.step import SwapHandle


class SwapSpace:
    """Places for up to ``most_bytes`` of state together; the lowest number that is free is next."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._sizes: dict[SwapHandle, int] = {}
        self._free: list[int] = []

    def take(self, num_bytes: int) -> SwapHandle | None:
        """A place for so many bytes; None where there is no room for them."""
        if self._num_bytes + num_bytes > self._most_bytes:
            return None
        number = heapq.heappop(self._free) if self._free else len(self._sizes)
        place = SwapHandle(number)
        self._sizes[place] = num_bytes
        self._num_bytes += num_bytes
        return place

    def give_back(self, place: SwapHandle) -> None:
        """Give a place in host memory back, for the state of another request."""
        self._num_bytes -= self._sizes.pop(place)
        heapq.heappush(self._free, place)

    def forget(self) -> None:
        """Free all places in host memory; what they hold is worth nothing any more."""
        self._sizes.clear()
        self._free.clear()
        self._num_bytes = 0
