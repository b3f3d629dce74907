"""The tokens of a step on the device, with their positions and slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import ImageTiles

MAX_ROWS = 8
"""Maximum rows of a slot in a step with per-sequence state."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Consecutive rows by slot, for per-sequence state. int64 ``[R]``, 0 at later rows.

    Attributes:
        counts: Number of rows, at a slot's first row. Padding has 1.
        accepted: Drafts accepted in the slot's previous pass, at its first row.
    """

    counts: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a step, int64.

    Attributes:
        tokens: Token ids.
        positions: Positions. Negative: padding.
        slots: Slots.
        keeps: Slot for a copy of the state before a prompt token. -1: none.
        words: Contiguous memory ``[4, R]`` with all fields. None: separate tensors.
        by_slot: Rows by slot. None: a row is a slot.
        offsets: Rotary position minus position, ``[R]`` or by rotated pair. None: zeros.
        image_rows: Indices and their image embeddings, float32. None: no images.
        ends: Position after the last visible position, ``[R]``. None: causal.
        tiles: Image tiles for cross-attention layers. None: the step skips them.
        hidden: A draft layer's input: hidden states ``[R, hidden]``. None: not a draft layer.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keeps: Tensor | None = None
    words: Tensor | None = None
    by_slot: SlotRows | None = None
    offsets: Tensor | None = None
    image_rows: tuple[Tensor, Tensor] | None = None
    ends: Tensor | None = None
    tiles: ImageTiles | None = None
    hidden: Tensor | None = None

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


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Prefill chunks and decode rows in a batch. The default is a single chunk.

    Attributes:
        starts: Start index by chunk, then the end of all chunks, int64 ``[P + 1]``, with padding
            at a chunk's end. A delta rule or a convolution needs multiples of 64. None: a single
            chunk.
        is_short: Whether chunks are short, see :func:`.prefill_triton.attend_prefill`.
        decoding: Decode rows after all chunks. Only their mixers differ.
    """

    starts: Tensor | None = None
    is_short: bool = False
    decoding: slice = field(default_factory=lambda: slice(0, 0))

    @property
    def is_mixed(self) -> bool:
        """Return whether the batch has decode rows."""
        return self.decoding.stop > self.decoding.start


SINGLE_CHUNK = ChunkLayout()
