"""The rows of a step on the device: which token, where in its sequence, in whose seat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.marks import NO_MARKS, Marks
from tilewright.compiler.targets.cuda.seats import send


@dataclass(frozen=True, slots=True)
class Rows:
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
        words = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        words[1], words[3] = -1, -1
        return cls(words[0], words[1], words[2], words[3], words)

    def part(self, rows: slice) -> Self:
        """Take some of the rows."""
        keeps = None if self.keeps is None else self.keeps[rows]
        return type(self)(self.tokens[rows], self.positions[rows], self.slots[rows], keeps)

    def upload(self, tokens: Sequence[int], first: int, slot: int, marks: Marks = NO_MARKS) -> None:
        """Consecutive tokens of one sequence from a position on, with the marks inside of them; the
        other rows become padding.

        For rows that :meth:`padding` made.
        """
        assert self.words is not None
        staged, count = np.zeros((4, len(self.tokens)), dtype=np.int64), len(tokens)
        staged[0, :count] = tokens
        staged[1, :count] = np.arange(first, first + count)
        staged[1, count:] = -1
        staged[2, :count], staged[3] = slot, -1
        for (_, at), place in marks.items():
            staged[3, at - first] = place
        self.words.copy_(send(staged, self.words.device))
