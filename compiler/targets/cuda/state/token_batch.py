"""The tokens of a step on the device, with their positions and slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

SKIPPED_TOKEN = -2
"""Position for tokens of another launch."""


@dataclass(frozen=True, slots=True)
class DraftChain:
    """Per-sequence state for drafts. Token j continues the state after token j - 1.

    Attributes:
        positions: int64 ``[waves, R]``. Wave j computes token j by slot. Other tokens are skipped.
        sources: State to read by token, an index into the state tensors.
        targets: State to write by token. Token 0 writes the slot.
    """

    positions: Tensor
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a step, int64.

    Attributes:
        tokens: Token ids.
        positions: Positions. Negative: padding.
        slots: Slots.
        keeps: Slot for a copy of the state before a prompt token. -1: none.
        words: Contiguous memory ``[4, R]`` with all fields. None: separate tensors.
        chain: Per-sequence state for drafts. None: no drafts.
        offsets: Rotary position minus position, ``[R]`` or by rotated pair. None: zeros.
        image_rows: Indices and their image embeddings, float32. None: no images.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keeps: Tensor | None = None
    words: Tensor | None = None
    chain: DraftChain | None = None
    offsets: Tensor | None = None
    image_rows: tuple[Tensor, Tensor] | None = None

    @classmethod
    def padding(cls, num_rows: int, device: torch.device) -> Self:
        """Return padding in new memory."""
        return cls.over(torch.zeros(4, num_rows, dtype=torch.int64, device=device))

    @classmethod
    def over(cls, words: Tensor) -> Self:
        """Return padding in ``words [4, R]``."""
        words[1], words[3] = -1, -1
        return cls(words[0], words[1], words[2], words[3], words)

    def part(self, rows: slice) -> Self:
        """Return a slice."""
        keeps = None if self.keeps is None else self.keeps[rows]
        return type(self)(self.tokens[rows], self.positions[rows], self.slots[rows], keeps)
