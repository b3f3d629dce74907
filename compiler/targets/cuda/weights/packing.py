"""Conversion between dense and packed weights with torch operations, on any device.

Values are the formats' values. Excludes kernels and weight names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from tilewright.compiler.formats import BlockEncoded, BlockFloat, get_format
from tilewright.compiler.formats.block_float import BLOCK_SIZE
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    EXPERT_TILE_BYTES,
    EXPONENTS,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
    tile_bytes,
)
from tilewright.compiler.targets.cuda.weights.packing_mxfp4 import tiles_mxfp4, values_mxfp4
from tilewright.errors import CompileError, allowed

KINDS = ("bf16", *TILE_BYTES, *EXPERT_TILE_BYTES)
GROUP = 8
"""Consecutive gate or up rows in a paired weight."""

_EMPTY = 64  # exponent for a block with zeros
_CHUNK_ELEMENTS = 1 << 26  # elements packed at a time; scratch is about 20 bytes an element
_PER_LANE = 4  # exponents


def _no_name(index: int) -> str:
    return "a weight"


def hold(
    dense: Tensor,
    kind: str,
    *,
    paired: bool,
    scale: float | None = None,
    name_of: Callable[[int], str] = _no_name,
) -> PackedWeight:
    """Pack ``dense [out, in]`` (floating point) in a storage format, on the same device.

    Args:
        kind: Storage format from ``KINDS``.
        paired: The first half has gate rows and the second has up rows, in multiples of 8. They are
            interleaved in groups with 8 rows.
        scale: Common scale for several weights. None: :func:`scale_of`.
        name_of: Tensor name for a packed row, for messages.

    Raises:
        CompileError: The format is unknown, the rows cannot be paired, a block exponent is
            outside ``EXPONENTS`` (see :func:`fits`), or mxfp4 lacks a value.
    """
    _check(dense, kind, paired, name_of(0))
    num_rows, num_columns = dense.shape
    row_tiles, column_tiles = -(-num_rows // TILE_ROWS), -(-num_columns // TILE_COLUMNS)
    if kind == "bf16":
        shape: tuple[int, ...] = (row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
        data = dense.new_zeros(shape, dtype=torch.bfloat16)
    else:
        shape = (row_tiles, column_tiles, tile_bytes(kind))
        data = dense.new_empty(shape, dtype=torch.uint8)
    scale = scale_of(dense, kind) if scale is None else scale
    step = max(1, _CHUNK_ELEMENTS // max(1, column_tiles * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, row_tiles, step):
        last = min(row_tiles, first + step)
        rows = _rows(dense, slice(first * TILE_ROWS, min(num_rows, last * TILE_ROWS)), paired)
        if kind == "bf16":
            data[first * TILE_ROWS :][: rows.shape[0], :num_columns] = rows
        else:
            own = partial(_name_after, name_of, first * TILE_ROWS)
            data[first:last] = _tiles(rows.float() / scale, kind, own)
    return PackedWeight(kind, num_rows, num_columns, data, is_paired=paired, scale=scale)


def _name_after(name_of: Callable[[int], str], first: int, index: int) -> str:
    return name_of(first + index)


def fits(dense: Tensor, kind: str, *, scale: float | None = None) -> bool:
    """Return whether :func:`hold` supports ``dense [out, in]``: all block exponents are in range.

    Synchronizes with the device.

    Raises:
        CompileError: The format is unknown.
    """
    _check_kind(kind)
    if kind == "bf16":
        return True
    scale = scale_of(dense, kind) if scale is None else scale
    padded = _padded(dense.float())
    exponents = _shared_exponents(padded / scale)
    if scale > 1 and bool(((exponents == 0) & (_shared_exponents(padded) > 0)).any()):
        return False
    return _stray_exponent(exponents, kind) is None


def unpack(weight: PackedWeight) -> Tensor:
    """Return the values as float32 ``[num_rows, num_columns]``, in packed row order.

    Experts are concatenated along the rows.
    """
    assert weight.format in KINDS, "see unpack_coded"
    if weight.format == "bf16":
        values = weight.data.float()
    else:
        values = _values(weight.data, weight.format) * weight.scale
    rows = values.view(weight.num_experts, -1, values.shape[1])[:, : weight.num_rows]
    return rows[:, :, : weight.num_columns].reshape(-1, weight.num_columns).contiguous()


def scale_of(dense: Tensor, kind: str) -> float:
    """Return the power of two by which a weight exceeds the exponent range, or 1."""
    if kind == "bf16" or dense.numel() == 0:
        return 1.0
    exponent = int(dense.abs().amax().float().view(torch.int32) >> 23)
    most = EXPONENTS[kind][1]
    return 2.0 ** (exponent - most) if most < exponent < 255 else 1.0


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise CompileError(f"cuda holds no weights in {kind}; {allowed(KINDS)}")


def _check(dense: Tensor, kind: str, paired: bool, name: str) -> None:
    _check_kind(kind)
    assert dense.ndim == 2 and dense.is_floating_point()
    if paired:
        check_pairs(dense.shape[0], name)


def check_pairs(num_rows: int, name: str) -> None:
    """Raise an error if rows of gate and up cannot be in turns of `GROUP`."""
    if num_rows % (2 * GROUP):
        raise CompileError(
            f"{name}: {num_rows} rows of gate and up cannot be paired; allowed: multiples of 16"
        )


def _rows(dense: Tensor, rows: slice, paired: bool) -> Tensor:
    """Return some rows, in whole tiles and packed order."""
    if not paired:
        return dense[rows]
    half = dense.shape[0] // 2
    part = slice(rows.start // 2, rows.stop // 2)
    halves = torch.stack((dense[:half][part], dense[half:][part]))
    return halves.view(2, -1, GROUP, dense.shape[1]).transpose(0, 1).reshape(-1, dense.shape[1])


def _padded(x_NK: Tensor) -> Tensor:
    padding = (0, -x_NK.shape[1] % TILE_COLUMNS, 0, -x_NK.shape[0] % TILE_ROWS)
    return torch.nn.functional.pad(x_NK, padding).contiguous()


def _shared_exponents(x_NK: Tensor) -> Tensor:
    """Return every block's exponent, int32, from its largest magnitude or NaN."""
    largest = x_NK.view(x_NK.shape[0], -1, BLOCK_SIZE).abs().amax(-1)
    return largest.view(torch.int32) >> 23


def _stray_exponent(exponents: Tensor, kind: str) -> int | None:
    """Return an exponent out of range, or None. A block with exponent 0 has zeros only."""
    first, last = EXPONENTS[kind]
    if exponents.numel() == 0:
        return None
    ends = torch.stack((exponents.masked_fill(exponents == 0, _EMPTY).min(), exponents.max()))
    low, high = ends.tolist()
    if high > last:
        return int(high)
    return int(low) if low < first else None


def _tiles(x_NK: Tensor, kind: str, name_of: Callable[[int], str]) -> Tensor:
    """Return float32 rows as uint8 ``[row tiles, column tiles, TILE_BYTES]``."""
    x_NK = _padded(x_NK)
    if kind == "mxfp4":
        return tiles_mxfp4(x_NK, name_of)
    shape = x_NK.shape
    # As a single row: the codec splits rows for CPU caches, which would need thousands of launches.
    flat = x_NK if x_NK.device.type == "cpu" else x_NK.view(1, -1)
    encoded = _block_format(kind).quantise(flat)
    exponents = encoded.exponents.view(shape[0], -1)
    mantissas = encoded.mantissas.view(shape)
    stray = _stray_exponent(exponents, kind)
    if stray is not None:
        least, most = EXPONENTS[kind]
        index = int((exponents == stray).any(1).nonzero()[0])
        raise CompileError(
            f"{name_of(index)}: a block of {kind} has exponent {stray}; "
            f"allowed: {least} to {most}, or bf16"
        )
    exponents = exponents.masked_fill(exponents == 0, _EMPTY)
    pieces = _pieces_bfp8(mantissas) if kind == "bfp8" else _pieces_bfp4(mantissas)
    return torch.cat((pieces, lay_exponents(exponents)), dim=-1)


def _pieces_bfp8(mantissas_NK: Tensor) -> Tensor:
    # The two bits in the column number, for a word with 4 columns. A sign is in the second byte.
    parts = mantissas_NK.view(-1, 2, 2)
    codes = parts.abs().view(torch.uint8) | (parts < 0).flip(1).to(torch.uint8) << 7
    codes = codes.transpose(1, 2).reshape(mantissas_NK.shape)
    # Row tile, row + 8, g; column tile, half, columns.
    parts = codes.view(codes.shape[0] // TILE_ROWS, 2, 8, -1, 2, 64)
    return parts.permute(0, 3, 4, 1, 2, 5).flatten(2)


def _pieces_bfp4(mantissas_NK: Tensor) -> Tensor:
    # For 8 columns in a word: byte in the half word, nibble, half word.
    low, high = mantissas_NK.view(-1, 2, 2, 2).unbind(2)
    signs = (high < 0).flip(1).to(torch.uint8)
    codes = (low + 8).view(torch.uint8) | high.abs().view(torch.uint8) << 4 | signs << 7
    codes = codes.transpose(1, 2).reshape(mantissas_NK.shape[0], -1)
    # Row tile, row + 8, g; column tile, half, t, bytes.
    parts = codes.view(codes.shape[0] // TILE_ROWS, 2, 8, -1, 2, 4, 8)
    return parts.permute(0, 3, 1, 2, 5, 4, 6).flatten(2)


def lay_exponents(exponents_NB: Tensor) -> Tensor:
    """Return a byte for every block of 16 columns in tile order, uint8 ``[row tiles, column tiles,
    128]``.
    """
    # Row tile, row + 8, g; column tile, half, t.
    parts = exponents_NB.view(exponents_NB.shape[0] // TILE_ROWS, 2, 8, -1, 2, 4)
    return parts.permute(0, 3, 2, 5, 4, 1).flatten(2)


def codes_of(data: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the tiles' contents.

    These are mantissas, int8 ``[16 row tiles, 128 column tiles]``, and block exponents, uint8 ``[16
    row tiles, 8 column tiles]``.
    """
    row_tiles, column_tiles, num_bytes = data.shape
    rows, columns = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    pieces, exponents = data.split((num_bytes - 32 * _PER_LANE, 32 * _PER_LANE), dim=-1)
    exponents = exponents.reshape(row_tiles, column_tiles, 8, 4, 2, 2)
    exponents = exponents.permute(0, 5, 2, 1, 4, 3).reshape(rows, -1)
    unpacked = _mantissas_bfp8(pieces) if kind == "bfp8" else _mantissas_bfp4(pieces)
    return unpacked.reshape(rows, columns), exponents


def _values(data: Tensor, kind: str) -> Tensor:
    """Return the values in tiles with padding, float32 ``[16 row tiles, 128 column tiles]``."""
    if kind == "mxfp4":
        return values_mxfp4(data)
    mantissas, exponents = codes_of(data, kind)
    rows, columns = mantissas.shape
    shape = (rows, columns) if data.device.type == "cpu" else (1, rows * columns)
    encoded = BlockEncoded(
        exponents=exponents.reshape(shape[0], -1), mantissas=mantissas.reshape(shape), axis=-1
    )
    return _block_format(kind).dequantise(encoded).view(rows, columns)


def _mantissas_bfp8(pieces: Tensor) -> Tensor:
    """Return int8 mantissas in row and column order, from vectors [row tiles, column tiles,
    bytes].
    """
    parts = pieces.reshape(*pieces.shape[:2], 2, 2, 8, 64).permute(0, 3, 4, 1, 2, 5)
    codes = parts.reshape(-1, 2, 2).transpose(1, 2)
    magnitudes = (codes & 0x7F).to(torch.int8)
    return torch.where(codes.flip(1) >= 0x80, -magnitudes, magnitudes)


def _mantissas_bfp4(pieces: Tensor) -> Tensor:
    """Return int8 mantissas in row and column order, from vectors [row tiles, column tiles,
    bytes].
    """
    parts = pieces.reshape(*pieces.shape[:2], 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
    codes = parts.reshape(-1, 2, 2).transpose(1, 2)
    magnitudes = (codes >> 4 & 7).to(torch.int8)
    high = torch.where(codes.flip(1) >= 0x80, -magnitudes, magnitudes)
    return torch.stack(((codes & 0xF).to(torch.int8) - 8, high), dim=2)


def _block_format(kind: str) -> BlockFloat:
    return cast(BlockFloat, get_format(kind))
