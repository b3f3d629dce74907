"""Slots of finished sequences with retained state, for prompts with a common prefix.

They serve executables without pages, with contiguous state per slot. Only tokens and slot numbers
are stored here. The executable owns the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright.compiler.targets.interface.step import Seat


@dataclass(frozen=True, slots=True)
class Kept:
    """A cached slot.

    Attributes:
        tokens: Tokens in the state.
        reached: Maximum number of positions the state ever had.
        salt: Cache salt. Only requests with the same salt may use the slot.
        num_bytes: Size of the state in bytes.
    """

    tokens: tuple[int, ...]
    reached: int
    salt: str
    num_bytes: int


class KeptSeats:
    """The cached slots by last use.

    Args:
        size_of: Returns the state bytes for a number of positions.
        most: Maximum total bytes.
    """

    def __init__(self, size_of: Callable[[int], int], most: int) -> None:
        self._size_of, self._most = size_of, most
        self._num_bytes = 0
        self._kept: OrderedDict[Seat, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Seat, Kept]]:
        """Yield slots, least recently used first."""
        return iter(self._kept.items())

    def keep(self, seat: Seat, tokens: tuple[int, ...], salt: str, *, reached: int) -> list[Seat]:
        """Add the slot of a finished sequence with ``tokens``. Return evicted slots, least recently
        used first.

        The new slot may itself be evicted.
        """
        kept = Kept(tokens, reached, salt, self._size_of(len(tokens)))
        self._kept[seat] = kept
        self._num_bytes += kept.num_bytes
        left = []
        while self._num_bytes > self._most:
            left.append(self.take_oldest())
        return left

    def touch(self, seat: Seat) -> None:
        """Mark a slot as most recently used."""
        self._kept.move_to_end(seat)

    def take(self, seat: Seat) -> Seat:
        """Remove a slot from the cache."""
        self._num_bytes -= self._kept.pop(seat).num_bytes
        return seat

    def take_oldest(self, *, besides: Seat | None = None) -> Seat:
        """Remove the least recently used slot. ``besides`` is taken only if it is the last slot."""
        seats = iter(self._kept)
        seat = next(seats)
        if seat == besides:
            seat = next(seats, seat)
        return self.take(seat)

    def forget(self) -> list[Seat]:
        """Remove and return all slots."""
        seats = list(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return seats


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
