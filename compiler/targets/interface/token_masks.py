"""Token masks for masked steps: a bit per token, from the grammar library to the sampling kernel.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.compiler.targets.interface.step import Slot

_BITS = 32


def num_words(vocab_size: int) -> int:
    """Return the word count in a row's bitmask."""
    return -(-vocab_size // _BITS)


def no_words() -> np.ndarray:
    """Return the words for zero rows."""
    return np.empty((0, 0), np.uint32)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Token bitmasks for some slots of a step. All other slots may sample any token.

    Attributes:
        slots: Slots with a mask.
        words: uint32 ``[len(slots), num_words(vocabulary)]``, contiguous. Token ``t`` is bit ``t %
            32`` in word ``t // 32``, with bit 0 lowest. Bits after the vocabulary are ignored.
    """

    slots: tuple[Slot, ...] = ()
    words: np.ndarray = field(default_factory=no_words)

    def flags(self, slot: Slot, width: int) -> np.ndarray | None:
        """Return a slot's allowed tokens as bool ``[width]``. None: all tokens."""
        if slot not in self.slots:
            return None
        words = self.words[self.slots.index(slot)].astype("<u4", copy=False)
        return np.unpackbits(words.view(np.uint8), count=width, bitorder="little").view(bool)


NO_MASK = TokenMask()
"""The mask of a step without masked rows."""


def put_bits(words: np.ndarray, tokens: tuple[int, ...], *, are_set: bool) -> None:
    """Set or clear the bits for tokens in the ``words`` of a row."""
    for token in tokens:
        bit = np.uint32(1 << token % _BITS)
        if are_set:
            words[token // _BITS] |= bit
        else:
            words[token // _BITS] &= ~bit
