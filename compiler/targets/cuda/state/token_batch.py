"""The rows of a step on the device: which token, where in its sequence, in whose slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

SKIPPED_ROW = -2
"""Position of a row that another launch computes."""


@dataclass(frozen=True, slots=True)
class DraftChain:
    """Per-sequence state of rows with drafts. Row j of a slot continues the state of row j - 1.

    Attributes:
        positions: int64 ``[waves, R]``. Wave j computes row j of each slot and skips other rows.
        sources: State to read, as index of the state tensors, by row.
        targets: State to write, by row. A slot's row 0 writes the slot itself.
    """

    positions: Tensor
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a step: ``tokens``, ``positions`` (negative: padding) and ``slots``, int64;
    ``keeps``, of tokens of prompts: the slot that gets the state as it is before this one, -1 for
    none. ``words [4, R]``: all of them, where they lie together. ``chain``: None without drafts.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keeps: Tensor | None = None
    words: Tensor | None = None
    chain: DraftChain | None = None

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
