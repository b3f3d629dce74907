"""Which tokens the rows of a masked step may be chosen from: a bit a token, all the way from the
grammar's library to the kernel that reads them. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.compiler.targets.interface.step import Seat

_BITS = 32


def num_words(vocab_size: int) -> int:
    """Words of a row's bits."""
    return -(-vocab_size // _BITS)


def no_words() -> np.ndarray:
    """The words of no row."""
    return np.empty((0, 0), np.uint32)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What some seats may be chosen, a row each; other seats of the step may be chosen every token.

    ``words``: uint32 ``[len(seats), num_words(vocabulary)]``, contiguous. Token ``t`` is bit
    ``t % 32``, the lowest being bit 0, of word ``t // 32``; what lies behind the vocabulary does
    not count.
    """

    seats: tuple[Seat, ...] = ()
    words: np.ndarray = field(default_factory=no_words)

    def flags(self, seat: Seat, width: int) -> np.ndarray | None:
        """Of the first ``width`` tokens which a seat may be chosen, bool; None: every one."""
        if seat not in self.seats:
            return None
        words = self.words[self.seats.index(seat)].astype("<u4", copy=False)
        return np.unpackbits(words.view(np.uint8), count=width, bitorder="little").view(bool)


def put_bits(words: np.ndarray, tokens: tuple[int, ...], *, are_set: bool) -> None:
    """Set or clear the bits of tokens in the ``words`` of one row."""
    for token in tokens:
        bit = np.uint32(1 << token % _BITS)
        if are_set:
            words[token // _BITS] |= bit
        else:
            words[token // _BITS] &= ~bit
