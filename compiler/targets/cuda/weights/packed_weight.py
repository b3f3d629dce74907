"""Weights as the kernels read them: bfloat16 rows, or block formats in tiles of 16 rows x 128.

A tile of a block format is one run of bytes in the order in which the 32 lanes of a warp read it.
Lane ``4 g + t`` owns rows g and g + 8, and of each half (64 columns) of the tile columns
16 t .. 16 t + 15: one block of each row, so one exponent. 16-byte pieces come first, lane by lane,
then four exponents a lane in the order (half 0, row g), (half 0, row g + 8), (half 1, row g) ...

Codes lie so that one exchange of bytes and one mask yield pairs of bfloat16, and 2 ** e scales both
kinds. A piece's words come in column order; bits of a 32-bit word:
bfp8: a piece per (half, row), a word 4 columns; byte 0 column 0, byte 2 column 1, byte 1 column 2,
byte 3 column 3. Bits 0-6 of a byte are its magnitude; its sign is bit 7 of the other byte of its
half word.
bfp4: a piece per row, half 0 then half 1; a word 8 columns, the even ones in the low half word. In
a half word columns 2 i or 2 i + 1 have bits 4 i .. 4 i + 3 for value + 8 where i is 0 or 2, bits
4 i .. 4 i + 2 for the magnitude where i is 1 or 3; the sign is bit 15 for i = 1, bit 7 for i = 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 16, 128
TILE_BYTES = {"bfp8": 2176, "bfp4": 1152}
"""Mantissas and exponents of a tile."""

BIAS = {"bfp8": 133, "bfp4": 129}
"""value = mantissa * 2 ** (e - BIAS), e being the stored (the format's) exponent of the block."""

EXPONENTS = {"bfp8": (0, 127), "bfp4": (3, 127)}
"""Exponents for which the kernels' bfloat16 arithmetic is exact; a weight of larger ones is held
with a ``scale``. A block of zeros, and padding, stores exponent 64, whatever the format's own."""


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A weight ``[num_rows, num_columns]`` (out first) on its device, or that of several experts,
    ``num_experts`` of such weights one below the other, each in tiles of its own.

    ``kind`` is ``bf16``: ``data`` bfloat16 ``[rows, columns]`` padded with zeros to whole tiles; or
    ``bfp8``, ``bfp4``: ``data`` uint8 ``[row tiles, column tiles, TILE_BYTES]``, of value 0 in the
    padding. ``is_paired``: rows are gate and up in turns of 8 (8 gate, 8 up, ...), so that a
    tile's rows g and g + 8 are a gate and its up. ``scale``: a power of two that what is held is
    to be multiplied by, 1 unless a value is 2 or more.
    """

    kind: str
    num_rows: int
    num_columns: int
    data: Tensor
    is_paired: bool = False
    scale: float = 1.0
    num_experts: int = 1

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The shape that ``data`` has."""
        rows, columns = self.num_experts * self.num_row_tiles, self.num_column_tiles
        if self.kind == "bf16":
            return rows * TILE_ROWS, columns * TILE_COLUMNS
        return rows, columns, TILE_BYTES[self.kind]

    @property
    def data_type(self) -> torch.dtype:
        """The type that ``data`` has."""
        return torch.bfloat16 if self.kind == "bf16" else torch.uint8

    @property
    def num_row_tiles(self) -> int:
        """Rows of tiles that one expert, or the whole weight where there is one, is held in."""
        return -(-self.num_rows // TILE_ROWS)

    @property
    def num_column_tiles(self) -> int:
        return -(-self.num_columns // TILE_COLUMNS)
