"""The rows of a step on the device: which token, where in its sequence, in whose slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a step: ``tokens``, ``positions`` (negative: padding) and ``slots``, int64;
    ``keeps``, of tokens of prompts: the slot that gets the state as it is before this one, -1 for
    none. ``words [4, R]``: all of them, where they lie together.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keeps: Tensor | None = None
    words: Tensor | None = None

    @classmethod
    def padding(cls, num_rows: int, device: torch.device) -> Self:
        """Rows that nothing has been uploaded to."""
        return cls.over(torch.zeros(4, num_rows, dtype=torch.int64, device=device))

    @classmethod
    def over(cls, words: Tensor) -> Self:
        """Rows of padding in ``words [4, R]``."""
        words[1], words[3] = -1, -1
        return cls(words[0], words[1], words[2], words[3], words)

    def part(self, rows: slice) -> Self:
        """Take some of the rows."""
        keeps = None if self.keeps is None else self.keeps[rows]
        return type(self)(self.tokens[rows], self.positions[rows], self.slots[rows], keeps)
