"""MXFP4 tiles: 4-bit float codes, and an exponent per block.

Encodes values instead of a file's codes, so equal values have equal bytes. `packed_weight` defines
the tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compiler.formats.scaled_codes import E2M1
from tilewright.compiler.targets.cuda.weights.coded_tiles import codes_of_halves, float4_halves
from tilewright.compiler.targets.cuda.weights.packed_weight import EXPONENTS, TILE_ROWS
from tilewright.errors import CompileError

_BLOCK = 32
_EMPTY = 64  # exponent of zeros
_BIAS = 3  # from the exponent of the largest magnitude to the stored exponent
_CODE_BYTES = 1024
_DOUBLED = tuple(int(2 * value) for value in E2M1[:8])


def tiles_mxfp4(x_NK: Tensor, name_of: Callable[[int], str]) -> Tensor:
    """Return float32 values in whole tiles as uint8 ``[tiles along N, tiles along K, bytes]``.

    Args:
        name_of: Tensor name for a row, for messages.

    Raises:
        CompileError: A value is not a 4-bit float at its block's exponent, or is not finite.
    """
    blocks = x_NK.view(x_NK.shape[0], -1, _BLOCK)
    exponents = blocks.abs().amax(-1).view(torch.int32) >> 23
    exponents = exponents.masked_fill(exponents == 0, _EMPTY + _BIAS)
    # The largest magnitude becomes eight or twelve halves.
    halves = torch.ldexp(blocks.abs(), (130 - exponents).unsqueeze(-1))
    codes = torch.zeros_like(halves, dtype=torch.uint8)
    for code, value in enumerate(_DOUBLED):
        codes.masked_fill_(halves == value, code)
    doubled = torch.tensor(_DOUBLED, dtype=torch.float32, device=x_NK.device)
    is_code = doubled[codes.long()] == halves
    if not bool(is_code.all()):
        raise CompileError(
            f"{name_of(_first(~is_code))}: a value is not a 4-bit float at the exponent of its "
            "block; allowed: values of MXFP4, or bf16"
        )
    codes |= blocks.signbit().to(torch.uint8) << 3
    low, high = EXPONENTS["mxfp4"]
    is_near = (exponents >= low) & (exponents <= high)
    if not bool(is_near.all()):
        raise CompileError(
            f"{name_of(_first(~is_near))}: a block has an exponent outside {low} to {high}; "
            "allowed: bf16"
        )
    stored = (exponents - _BIAS).to(torch.uint8)
    return torch.cat((_words(codes.flatten(1)), _lay_exponents(stored)), dim=-1)


def _first(found: Tensor) -> int:
    return int(found.flatten(1).any(1).nonzero()[0])


def values_mxfp4(data: Tensor) -> Tensor:
    """Return the values in tiles with padding, float32 ``[N, K]``."""
    tiles, steps = data.shape[:2]
    halves = data[..., :_CODE_BYTES].contiguous().view(torch.int16)
    # Tiles, then g + 8, g, t, half, word.
    halves = halves.view(tiles, steps, 2, 8, 4, 2, 4).permute(0, 2, 3, 1, 5, 4, 6)
    codes = codes_of_halves(halves.reshape(tiles * TILE_ROWS, -1, 2)).movedim(0, 2).flatten(1)
    # Tiles, then g, t / 2, half, g + 8.
    stored = data[..., _CODE_BYTES:].reshape(tiles, steps, 8, 2, 2, 2)
    stored = stored.permute(0, 5, 2, 1, 4, 3).reshape(tiles * TILE_ROWS, -1)
    values = torch.tensor(E2M1, device=data.device)[codes.long()]
    exponents = stored.to(torch.int32).repeat_interleave(_BLOCK, dim=1) - 126
    return torch.ldexp(values, exponents)


def _words(codes: Tensor) -> Tensor:
    """Return the bytes for codes ``[N, K]`` by tile."""
    words = float4_halves(codes.view(len(codes), -1, 4, 2).movedim(2, 0)).view(torch.uint8)
    # Tile, g + 8, g, then tile, half, t, bytes.
    parts = words.view(len(codes) // TILE_ROWS, 2, 8, -1, 2, 4, 8)
    return parts.permute(0, 3, 1, 2, 5, 4, 6).flatten(2)


def _lay_exponents(exponents: Tensor) -> Tensor:
    """Return the bytes for exponents ``[N, K / 32]`` by tile."""
    # Tile, g + 8, g, then tile, half, t / 2.
    parts = exponents.view(len(exponents) // TILE_ROWS, 2, 8, -1, 2, 2)
    return parts.permute(0, 3, 2, 5, 4, 1).flatten(2)
