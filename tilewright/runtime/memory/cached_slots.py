"""Seats whose sequences have ended but whose state is kept, for prompts that begin as they did.

For executables without pages, where a seat's state lies in one piece. Knows tokens and numbers of
seats alone; the bytes are the executable's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright.compiler.targets.interface.step import Seat


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that a kept seat has read, the most positions that it has had, and the salt of
    those who may know of them.
    """

    tokens: tuple[int, ...]
    reached: int
    salt: str
    num_bytes: int


class KeptSeats:
    """The tokens that each kept seat has computed; there are never more of them than seats.

    ``size_of``: bytes of the state of so many positions; ``most``: of all kept seats together.
    """

    def __init__(self, size_of: Callable[[int], int], most: int) -> None:
        self._size_of, self._most = size_of, most
        self._num_bytes = 0
        self._kept: OrderedDict[Seat, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Seat, Kept]]:
        """Seats, the least recently used first."""
        return iter(self._kept.items())

    def keep(self, seat: Seat, tokens: tuple[int, ...], salt: str, *, reached: int) -> list[Seat]:
        """The sequence on a seat, which has read ``tokens``, has ended. Returns the seats that
        are kept no more, so that all fit: the least recently used, perhaps this very one.
        """
        kept = Kept(tokens, reached, salt, self._size_of(len(tokens)))
        self._kept[seat] = kept
        self._num_bytes += kept.num_bytes
        left = []
        while self._num_bytes > self._most:
            left.append(self.take_oldest())
        return left

    def touch(self, seat: Seat) -> None:
        """Note that a kept seat was of use: it is now the last to be given up."""
        self._kept.move_to_end(seat)

    def take(self, seat: Seat) -> Seat:
        """Take a seat out of those kept, for another use."""
        self._num_bytes -= self._kept.pop(seat).num_bytes
        return seat

    def take_oldest(self, *, besides: Seat | None = None) -> Seat:
        """The least recently used seat has another use; ``besides`` is taken only if alone."""
        seats = iter(self._kept)
        seat = next(seats)
        if seat == besides:
            seat = next(seats, seat)
        return self.take(seat)

    def forget(self) -> list[Seat]:
        """Keep no seat any more; returns those that were kept."""
        seats = list(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return seats


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many first tokens two sequences share."""
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
