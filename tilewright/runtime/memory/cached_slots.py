"""Finished sequence slots with retained state, for prompts with a common prefix.

They serve executables without pages, with contiguous state per slot. Only tokens and slot numbers
are stored here. The executable owns the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright.compiler.targets.interface.step import Slot


@dataclass(frozen=True, slots=True)
class CachedSlot:
    """A cached slot.

    Attributes:
        tokens: Tokens in the state.
        reached: Maximum number of positions the state ever had.
        salt: Cache salt. Only requests with the same salt may use the slot.
        num_bytes: The state's size in bytes.
    """

    tokens: tuple[int, ...]
    reached: int
    salt: str
    num_bytes: int


class CachedSlots:
    """The cached slots by last use.

    Args:
        size_of: Returns the state bytes for a position count.
        most: Maximum total bytes.
    """

    def __init__(self, size_of: Callable[[int], int], most: int) -> None:
        self._size_of, self._most = size_of, most
        self._num_bytes = 0
        self._kept: OrderedDict[Slot, CachedSlot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Slot, CachedSlot]]:
        """Yield slots, least recently used first."""
        return iter(self._kept.items())

    def keep(self, slot: Slot, tokens: tuple[int, ...], salt: str, *, reached: int) -> list[Slot]:
        """Add a finished sequence's slot with ``tokens``. Return evicted slots, least recently
        used first.

        The new slot may itself be evicted.
        """
        kept = CachedSlot(tokens, reached, salt, self._size_of(len(tokens)))
        self._kept[slot] = kept
        self._num_bytes += kept.num_bytes
        left = []
        while self._num_bytes > self._most:
            left.append(self.take_oldest())
        return left

    def touch(self, slot: Slot) -> None:
        """Mark a slot as most recently used."""
        self._kept.move_to_end(slot)

    def take(self, slot: Slot) -> Slot:
        """Remove a slot from the cache."""
        self._num_bytes -= self._kept.pop(slot).num_bytes
        return slot

    def take_oldest(self, *, besides: Slot | None = None) -> Slot:
        """Remove the least recently used slot. ``besides`` is taken only if it is the last slot."""
        slots = iter(self._kept)
        slot = next(slots)
        if slot == besides:
            slot = next(slots, slot)
        return self.take(slot)

    def forget(self) -> list[Slot]:
        """Remove and return all slots."""
        slots = list(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return slots


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of two sequences' common prefix."""
    low, high = 0, min(len(one), len(other))
    step = 32
    while low < high:
        middle = min(high, low + step)
        if one[low:middle] == other[low:middle]:
            low, step = middle, 2 * step
        elif middle == low + 1:
            break
        else:
            high, step = middle, max(1, (middle - low) // 2)
    return low
