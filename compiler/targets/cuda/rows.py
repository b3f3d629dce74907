"""The rows of a step on the device: which token, where in its sequence, in whose seat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.seats import send


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a step: ``tokens``, ``positions`` (negative: padding) and ``slots``, int64;
    ``words [3, R]``: all of them, where they lie together.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor | None = None

    @classmethod
    def padding(cls, num_rows: int, device: torch.device) -> Self:
        """Rows that nothing has been uploaded to."""
        words = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        words[1] = -1
        return cls(words[0], words[1], words[2], words)

    def part(self, rows: slice) -> Self:
        """Take some of the rows."""
        return type(self)(self.tokens[rows], self.positions[rows], self.slots[rows])

    def upload(self, tokens: Sequence[int], first: int, slot: int) -> None:
        """Consecutive tokens of one sequence from a position on; the other rows become padding.

        For rows that :meth:`padding` made.
        """
        assert self.words is not None
        staged, count = np.zeros((3, len(self.tokens)), dtype=np.int64), len(tokens)
        staged[0, :count] = tokens
        staged[1, :count] = np.arange(first, first + count)
        staged[1, count:] = -1
        staged[2, :count] = slot
        self.words.copy_(send(staged, self.words.device))
