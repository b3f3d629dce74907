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

    def keep(self, seat: Seat, tokens: Sequence[int], computed: int) -> bool:
        """The sequence on a seat has ended: its first ``computed`` tokens were read, of which these
        are known. Whether the seat is kept: not where it holds nothing, or what cannot be cut off.
        """
        is_kept = computed > 0 and not (self._whole and computed > len(tokens))
        if is_kept:
            self._tokens[seat] = tuple(tokens[:computed])
        return is_kept

    def take_best(self, prompt: Sequence[int], *, are_others_free: bool) -> tuple[Seat, int] | None:
        """The seat that shares the longest beginning with a prompt, and how many tokens that is:
        it is not kept any more. None where no seat shares any, and where ``are_others_free`` and
        most of the seat would be lost for little of this prompt.
        """
        found = self.find(prompt)
        if found is None:
            return None
        seat, length = found
        if are_others_free and 2 * length < min(len(prompt), len(self._tokens[seat])):
            return None
        del self._tokens[seat]
        return found

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
