"""Weights in the kernels' layout: bfloat16 rows, or block formats in tiles.

A tile has ``16`` rows and ``128`` columns. In a block-format tile, bytes are in a warp's read
order. Lane ``4 g + t`` has the rows ``g`` and ``g + 8``. In both tile halves (``64`` columns), the
lane has the columns ``16 t .. 16 t + 15``, a block with an exponent in every row. First come
16-byte vectors, lane by lane. Then come four exponents for every lane, in the order ``(half 0, row
g)``, ``(half 0, row g + 8)``, ``(half 1, row g)`` and ``(half 1, row g + 8)``.

A byte permutation and a mask decode pairs of bfloat16, and ``2 ** e`` scales both formats. A
vector's words are in column order. A 32-bit word has these bits:

- bfp8: A vector for every half and row, with four columns in a word. Bytes ``0, 2, 1, 3`` are the
  columns ``0, 1, 2, 3``. Bits ``0-6`` in a byte are the magnitude. The sign is bit ``7`` in the
  second byte of the half word.
- bfp4: A vector for every row, half ``0`` then half ``1``, with eight columns in a word. The low
  half word has the even columns. In a half word, column ``2 i`` or ``2 i + 1`` has the bits
  ``4 i .. 4 i + 3`` with value + 8 if i is ``0`` or ``2``. If i is ``1`` or ``3``, the bits
  ``4 i .. 4 i + 2`` are the magnitude. The sign is bit ``15`` for ``i = 1`` and bit ``7`` for
  ``i = 3``.
- mxfp4: Vectors as in bfp4. Words are the float words of `coded_tiles`, with pair i for
  the columns ``2 i`` and ``2 i + 1``. Lanes ``4 g + t`` and ``4 g + t + 1`` with even t share four
  exponents, because a block has 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES

TILE_ROWS, TILE_COLUMNS = 16, 128
TILE_BYTES = {"bfp8": 2176, "bfp4": 1152}
"""Size of a tile in bytes, with exponents."""


EXPERT_TILE_BYTES = {"mxfp4": 1088}
"""As `TILE_BYTES`, for formats of experts only."""


def tile_bytes(name: str) -> int:
    """Return a tile's size with blocks, or with codes of `CODED_TILES`."""
    blocks = TILE_BYTES | EXPERT_TILE_BYTES
    return blocks[name] if name in blocks else CODED_TILES[name].num_bytes


BIAS = {"bfp8": 133, "bfp4": 129}
"""value = mantissa * 2 ** (e - BIAS), with the block exponent e of the format."""

EXPONENTS = {"bfp8": (0, 127), "bfp4": (3, 127), "mxfp4": (4, 130)}
"""Range of exponents with exact bfloat16 arithmetic in the kernels, those of a block's largest
magnitude. A weight with larger exponents has a ``scale``. Blocks of zeros and padding store the
exponent 64.
"""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight ``[num_rows, num_columns]``, or one for each expert, in separate tiles.

    Attributes:
        kind: Storage format: ``bf16``, ``bfp8``, ``bfp4``, a key of `CODED_TILES` or, for experts,
            of `EXPERT_TILE_BYTES`.
        data: bfloat16 ``[rows, columns]`` padded with zeros to whole tiles, or uint8 ``[row tiles,
            column tiles, tile_bytes(name)]``.
        is_paired: Rows alternate: 8 gate, 8 up. Rows g and g + 8 of a tile are a gate and its up.
        scale: The stored values' factor, a power of two. 1 unless a value is 2 or more.
        num_experts: Weight count in ``data``.
        second_scales: Factors of rows in tile order, float64, for whole tiles. A product with a
            tile's scale rounds to the file's float32 scale. None: the format has none.
    """

    kind: str
    num_rows: int
    num_columns: int
    data: Tensor
    is_paired: bool = False
    scale: float = 1.0
    num_experts: int = 1
    second_scales: Tensor | None = None

    @property
    def format(self) -> str:
        """Storage format."""
        return self.kind

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of ``data``."""
        rows, columns = self.num_experts * self.num_row_tiles, self.num_column_tiles
        if self.format == "bf16":
            return rows * TILE_ROWS, columns * TILE_COLUMNS
        return rows, columns, tile_bytes(self.format)

    @property
    def data_type(self) -> torch.dtype:
        """Type of ``data``."""
        return torch.bfloat16 if self.format == "bf16" else torch.uint8

    @property
    def num_row_tiles(self) -> int:
        """Row tile count for a single weight or expert."""
        return -(-self.num_rows // TILE_ROWS)

    @property
    def num_column_tiles(self) -> int:
        return -(-self.num_columns // TILE_COLUMNS)
