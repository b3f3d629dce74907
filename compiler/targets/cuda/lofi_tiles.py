"""A bfp4 weight as lofi.cu reads it: tiles of 16 rows x 128 whose codes become e4m3 by a table.

A tile has the size and the lanes of `held`'s: lane ``4 g + t`` owns rows g and g + 8, and of each
half of the tile columns 16 t .. 16 t + 15. Four words of row g (half 0, half 1, two each), of 16
bytes a lane, then those of row g + 8, then four bytes a lane in the order (half 0, row g), (half 0,
row g + 8), (half 1, row g) ...: which of 16 powers of two the block has, 15 the row's largest.

A word is 8 columns: bits 4 i .. 4 i + 2 are column i's magnitude; the signs of columns 0 .. 3 are
bits 7, 15, 23, 31, those of columns 4 .. 7 bits 3, 11, 19, 27.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.held import BIAS, TILE_BYTES, TILE_ROWS, HeldWeight
from tilewright.compiler.targets.cuda.packing import codes_of, lay_exponents

LAST = 15
"""The power of two of a row's largest blocks: index i stands for 2 ** (i - 9) a magnitude."""


@dataclass(frozen=True, slots=True)
class LofiWeight:
    """A weight in such tiles: ``data`` uint8 ``[row tiles, column tiles, 1152]``; ``scales``,
    float32 ``[16 row tiles]``, are powers of two that multiply rows.
    """

    held: HeldWeight
    data: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes


def lofi_tiles(held: HeldWeight) -> LofiWeight | None:
    """A weight held in bfp4, in these tiles; None where a value is not exact in e4m3 beside the
    largest of its row.
    """
    assert held.kind == "bfp4" and held.num_experts == 1
    parts = [_tiles(part, held.scale) for part in held.data.split(_ROW_TILES)]
    if any(part is None for part in parts):
        return None
    data, scales = (torch.cat(each) for each in zip(*(p for p in parts if p), strict=True))
    return LofiWeight(held, data, scales)


_ROW_TILES = 128


def _tiles(data: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    mantissas, exponents = codes_of(data, "bfp4")
    blocks = mantissas.view(*exponents.shape, 16)
    is_zero = (blocks == 0).all(-1)
    exponents = exponents.int()
    most = exponents.masked_fill(is_zero, 0).amax(1, keepdim=True)
    indices = (exponents - most + LAST).masked_fill(is_zero, 0)
    below = (-indices).clamp(0, 3)[..., None]  # a magnitude has 3 bits
    if bool(((indices < -2) | ((blocks.abs() >> below << below) != blocks.abs()).any(-1)).any()):
        return None
    magnitudes = (blocks.abs() >> below).to(torch.uint8)
    signs = (blocks < 0).to(torch.uint8)
    # Words of 8 columns: their bytes are two magnitudes each, and a sign of either half.
    magnitudes, signs = (each.view(*exponents.shape, 2, 8) for each in (magnitudes, signs))
    codes = magnitudes[..., ::2] | magnitudes[..., 1::2] << 4
    codes = codes | signs[..., :4] << 7 | signs[..., 4:] << 3
    rows = mantissas.shape[0]
    pieces = codes.view(rows // TILE_ROWS, 2, 8, -1, 2, 4, 8)  # row + 8, g; column tile, half, t
    pieces = pieces.permute(0, 3, 1, 2, 5, 4, 6).flatten(2)
    laid = lay_exponents(indices.clamp(min=0).to(torch.uint8))
    tiles = torch.cat((pieces, laid), dim=-1)
    assert tiles.shape[-1] == TILE_BYTES["bfp4"]
    power = most[:, 0] - LAST + 9 - BIAS["bfp4"]
    scales = torch.ldexp(torch.full_like(power, scale, dtype=torch.float32), power)
    return tiles, scales.where(most[:, 0] > 0, 1.0)
