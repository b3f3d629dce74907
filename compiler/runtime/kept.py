"""Seats whose sequences have ended but whose state is kept, for prompts that begin as they did.

For executables without pages, where a seat's state lies in one piece. Knows tokens and numbers of
seats alone; the bytes are the executable's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tilewright.compiler.targets.step import Seat


class KeptSeats:
    """The tokens that each kept seat has computed; there are never more of them than seats.

    ``whole``: states cannot be cut back to a position, so that a seat is of use only where all
    that it holds begins the prompt.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._tokens: OrderedDict[Seat, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, seat: Seat, tokens: Sequence[int]) -> None:
        """The sequence on a seat has ended, and its state holds these tokens."""
        self._tokens[seat] = tuple(tokens)

    def find(self, prompt: Sequence[int]) -> tuple[Seat, int] | None:
        """The seat that shares the longest beginning with a prompt, and how many tokens that is;
        of equal ones the most recently used. None where no seat shares any.

        The last token of a prompt is always computed, so it is never counted.
        """
        best: tuple[Seat, int] | None = None
        for seat, tokens in self._tokens.items():
            length = common_length(tokens, prompt[:-1])
            if self._whole and length < len(tokens):
                continue
            if length and (best is None or length >= best[1]):
                best = seat, length
        return best

    def length(self, seat: Seat) -> int:
        """How many tokens a kept seat holds."""
        return len(self._tokens[seat])

    def take(self, seat: Seat) -> None:
        """A kept seat has another use from now on."""
        del self._tokens[seat]

    def take_oldest(self) -> Seat:
        """The least recently used seat, which has another use from now on."""
        seat, _ = self._tokens.popitem(last=False)
        return seat

    def forget(self) -> list[Seat]:
        """No seat is kept any more; returns those that were."""
        seats = list(self._tokens)
        self._tokens.clear()
        return seats


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
