"""From a dense weight to the bytes of `held`, and back: torch operations alone, on any device.

The values are the formats' own. It knows no kernels and no names of weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tilewright.compiler.formats import BlockEncoded, BlockFloat, get_format
from tilewright.compiler.formats.block_float import BLOCK_SIZE
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    EXPONENTS,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    HeldWeight,
)
from tilewright.errors import CompileError, allowed

KINDS = ("bf16", *TILE_BYTES)
GROUP = 8
"""Rows of gate, then rows of up, in a paired weight."""

_EMPTY = 64  # the exponent of a block of zeros
_CHUNK_ELEMENTS = 1 << 26  # what is packed at a time: its scratch is some 20 bytes an element
_PER_LANE = 4  # exponents


def hold(dense: Tensor, kind: str, *, paired: bool, scale: float | None = None) -> HeldWeight:
    """``dense [out, in]`` (floating point) as a weight of ``kind``, on the same device.

    ``paired``: the first half of the rows is gate and the second up, a multiple of 8 each; they
    are put in turns of 8. ``scale``: of what is held, where several weights have one in common.

    Raises:
        CompileError: for an unknown kind, halves that cannot be paired, and blocks of an exponent
            outside ``EXPONENTS`` (see :func:`fits`).
    """
    _check(dense, kind, paired)
    num_rows, num_columns = dense.shape
    row_tiles, column_tiles = -(-num_rows // TILE_ROWS), -(-num_columns // TILE_COLUMNS)
    if kind == "bf16":
        shape: tuple[int, ...] = (row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
        data = dense.new_zeros(shape, dtype=torch.bfloat16)
    else:
        shape = (row_tiles, column_tiles, TILE_BYTES[kind])
        data = dense.new_empty(shape, dtype=torch.uint8)
    scale = scale_of(dense, kind) if scale is None else scale
    step = max(1, _CHUNK_ELEMENTS // max(1, column_tiles * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, row_tiles, step):
        last = min(row_tiles, first + step)
        rows = _rows(dense, slice(first * TILE_ROWS, min(num_rows, last * TILE_ROWS)), paired)
        if kind == "bf16":
            data[first * TILE_ROWS :][: rows.shape[0], :num_columns] = rows
        else:
            data[first:last] = _tiles(rows.float() / scale, kind)
    return HeldWeight(kind, num_rows, num_columns, data, is_paired=paired, scale=scale)


def fits(dense: Tensor, kind: str, *, scale: float | None = None) -> bool:
    """Whether :func:`hold` takes ``dense [out, in]``: no block's exponent is out of range.

    Reads the answer back from the device.

    Raises:
        CompileError: for an unknown kind.
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


def unpack(held: HeldWeight) -> Tensor:
    """float32 ``[num_rows, num_columns]``: the values, rows as they are held (pairs in turns);
    of all experts one below the other.
    """
    if held.kind == "bf16":
        values = held.data.float()
    else:
        values = _values(held.data, held.kind) * held.scale
    rows = values.view(held.num_experts, -1, values.shape[1])[:, : held.num_rows]
    return rows[:, :, : held.num_columns].reshape(-1, held.num_columns).contiguous()


def scale_of(dense: Tensor, kind: str) -> float:
    """The power of two by which the weight is too large for the exponents that are held, or 1."""
    if kind == "bf16" or dense.numel() == 0:
        return 1.0
    exponent = int(dense.abs().amax().float().view(torch.int32) >> 23)
    most = EXPONENTS[kind][1]
    return 2.0 ** (exponent - most) if most < exponent < 255 else 1.0


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise CompileError(f"cuda holds no weights in {kind}; {allowed(KINDS)}")


def _check(dense: Tensor, kind: str, paired: bool) -> None:
    _check_kind(kind)
    assert dense.ndim == 2 and dense.is_floating_point()
    if paired and dense.shape[0] % (2 * GROUP):
        raise CompileError(
            f"{dense.shape[0]} rows of gate and up cannot be paired; allowed: multiples of 16"
        )


def _rows(dense: Tensor, rows: slice, paired: bool) -> Tensor:
    """Some rows, whole tiles of them, in the order in which they are held."""
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
    """The exponent of every block of 16, int32: that of its largest magnitude, NaN being it."""
    largest = x_NK.view(x_NK.shape[0], -1, BLOCK_SIZE).abs().amax(-1)
    return largest.view(torch.int32) >> 23


def _stray_exponent(exponents: Tensor, kind: str) -> int | None:
    """An exponent that the kernels' arithmetic is not exact for. A block of exponent 0 is zeros."""
    least, most = EXPONENTS[kind]
    if exponents.numel() == 0:
        return None
    ends = torch.stack((exponents.masked_fill(exponents == 0, _EMPTY).min(), exponents.max()))
    low, high = ends.tolist()
    if high > most:
        return int(high)
    return int(low) if low < least else None


def _tiles(x_NK: Tensor, kind: str) -> Tensor:
    """uint8 ``[row tiles, column tiles, TILE_BYTES]`` of float32 rows."""
    x_NK = _padded(x_NK)
    shape = x_NK.shape
    # One row: the codec walks over rows in pieces that suit a cache, thousands of launches here.
    flat = x_NK if x_NK.device.type == "cpu" else x_NK.view(1, -1)
    encoded = _block_format(kind).quantise(flat)
    exponents = encoded.exponents.view(shape[0], -1)
    mantissas = encoded.mantissas.view(shape)
    stray = _stray_exponent(exponents, kind)
    if stray is not None:
        least, most = EXPONENTS[kind]
        raise CompileError(
            f"{kind}: a block of weights has exponent {stray}; allowed: {least} to {most}, or bf16"
        )
    exponents = exponents.masked_fill(exponents == 0, _EMPTY)
    pieces = _pieces_bfp8(mantissas) if kind == "bfp8" else _pieces_bfp4(mantissas)
    return torch.cat((pieces, lay_exponents(exponents)), dim=-1)


def _pieces_bfp8(mantissas_NK: Tensor) -> Tensor:
    # Of the 4 columns of a word: the two bits of their number. Signs lie with the other high bit.
    parts = mantissas_NK.view(-1, 2, 2)
    codes = parts.abs().view(torch.uint8) | (parts < 0).flip(1).to(torch.uint8) << 7
    codes = codes.transpose(1, 2).reshape(mantissas_NK.shape)
    # Row tile, row + 8, g; column tile, half, columns.
    parts = codes.view(codes.shape[0] // TILE_ROWS, 2, 8, -1, 2, 64)
    return parts.permute(0, 3, 4, 1, 2, 5).flatten(2)


def _pieces_bfp4(mantissas_NK: Tensor) -> Tensor:
    # Of the 8 columns of a word: byte of the half word, its nibble, half word.
    low, high = mantissas_NK.view(-1, 2, 2, 2).unbind(2)
    signs = (high < 0).flip(1).to(torch.uint8)
    codes = (low + 8).view(torch.uint8) | high.abs().view(torch.uint8) << 4 | signs << 7
    codes = codes.transpose(1, 2).reshape(mantissas_NK.shape[0], -1)
    # Row tile, row + 8, g; column tile, half, t, bytes.
    parts = codes.view(codes.shape[0] // TILE_ROWS, 2, 8, -1, 2, 4, 8)
    return parts.permute(0, 3, 1, 2, 5, 4, 6).flatten(2)


def lay_exponents(exponents_NB: Tensor) -> Tensor:
    """A byte of every block of 16 columns, row by row, in the order in which tiles hold them: uint8
    ``[row tiles, column tiles, 128]``.
    """
    # Row tile, row + 8, g; column tile, half, t.
    parts = exponents_NB.view(exponents_NB.shape[0] // TILE_ROWS, 2, 8, -1, 2, 4)
    return parts.permute(0, 3, 2, 5, 4, 1).flatten(2)


def codes_of(data: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """What tiles hold: mantissas, int8 ``[16 row tiles, 128 column tiles]``, and the exponents of
    their blocks, uint8 ``[16 row tiles, 8 column tiles]``.
    """
    row_tiles, column_tiles, num_bytes = data.shape
    rows, columns = row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS
    pieces, exponents = data.split((num_bytes - 32 * _PER_LANE, 32 * _PER_LANE), dim=-1)
    exponents = exponents.reshape(row_tiles, column_tiles, 8, 4, 2, 2)
    exponents = exponents.permute(0, 5, 2, 1, 4, 3).reshape(rows, -1)
    unpacked = _mantissas_bfp8(pieces) if kind == "bfp8" else _mantissas_bfp4(pieces)
    return unpacked.reshape(rows, columns), exponents


def _values(data: Tensor, kind: str) -> Tensor:
    """float32 ``[16 row tiles, 128 column tiles]``: what the tiles hold, padding included."""
    mantissas, exponents = codes_of(data, kind)
    rows, columns = mantissas.shape
    shape = (rows, columns) if data.device.type == "cpu" else (1, rows * columns)
    encoded = BlockEncoded(
        exponents=exponents.reshape(shape[0], -1), mantissas=mantissas.reshape(shape), axis=-1
    )
    return _block_format(kind).dequantise(encoded).view(rows, columns)


def _mantissas_bfp8(pieces: Tensor) -> Tensor:
    """int8, in the order of rows and columns, of the pieces [row tiles, column tiles, bytes]."""
    parts = pieces.reshape(*pieces.shape[:2], 2, 2, 8, 64).permute(0, 3, 4, 1, 2, 5)
    codes = parts.reshape(-1, 2, 2).transpose(1, 2)
    magnitudes = (codes & 0x7F).to(torch.int8)
    return torch.where(codes.flip(1) >= 0x80, -magnitudes, magnitudes)


def _mantissas_bfp4(pieces: Tensor) -> Tensor:
    """int8, in the order of rows and columns, of the pieces [row tiles, column tiles, bytes]."""
    parts = pieces.reshape(*pieces.shape[:2], 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
    codes = parts.reshape(-1, 2, 2).transpose(1, 2)
    magnitudes = (codes >> 4 & 7).to(torch.int8)
    high = torch.where(codes.flip(1) >= 0x80, -magnitudes, magnitudes)
    return torch.stack(((codes & 0xF).to(torch.int8) - 8, high), dim=2)


def _block_format(kind: str) -> BlockFloat:
    return cast(BlockFloat, get_format(kind))
