"""Dequantization of packed weights in Triton, for matmuls in cuBLAS.

`tile_weights` uses the same functions to decode tiles in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.matmul.coded_rows import decode_rows
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import float4_codes
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    BIAS,
    EXPERT_TILE_BYTES,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
)

# Triton kernels may only read constexpr globals.
BFP8_BYTES = tl.constexpr(TILE_BYTES["bfp8"])
BFP4_BYTES = tl.constexpr(TILE_BYTES["bfp4"])
MXFP4_BYTES = tl.constexpr(EXPERT_TILE_BYTES["mxfp4"])
BFP8_EXPONENTS = tl.constexpr(TILE_BYTES["bfp8"] - 128)
BFP4_EXPONENTS = tl.constexpr(TILE_BYTES["bfp4"] - 128)

# A 7-bit bfp8 magnitude `m` fills the upper fraction bits of `2 ** -63`, which gives
# `2 ** -63 + m * 2 ** -70`. The steps from there to `m * 2 ** (e - BIAS)` are exact and normal.
_LIFT = tl.constexpr(64 << 23)
_LIFTED = tl.constexpr(2.0**-63)
_BFP8_FIELD = tl.constexpr(127 + 70 - BIAS["bfp8"])
# A nibble `n` fills the lowest bits of `2 ** 23`. Its value is `n - 8`.
_UNIT = tl.constexpr(150 << 23)
_NO_NIBBLE = tl.constexpr(2.0**23 + 8)
_BFP4_FIELD = tl.constexpr(127 - BIAS["bfp4"])

_TILES = 4  # adjacent column tiles per program


@triton.jit
def bfp8_values(codes, exponents):
    """Return float32 values from bytes (sign above magnitude) and broadcast exponents."""
    bits = codes.to(tl.int32)
    lifted = ((bits & 0x7F) << 16) | _LIFT
    scales = ((exponents.to(tl.int32) + _BFP8_FIELD) << 23).to(tl.float32, bitcast=True)
    magnitudes = (lifted.to(tl.float32, bitcast=True) - _LIFTED) * scales
    signs = (bits & 0x80) << 24
    return (magnitudes.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)


@triton.jit
def bfp4_values(nibbles, exponents):
    """Return float32 values from nibbles (int32, value + 8) and broadcast exponents."""
    scales = ((exponents.to(tl.int32) + _BFP4_FIELD) << 23).to(tl.float32, bitcast=True)
    return ((nibbles | _UNIT).to(tl.float32, bitcast=True) - _NO_NIBBLE) * scales


@triton.jit
def bfp8_codes(words):
    """Return int32 codes ``[..., 4]`` from words ``[...]``: sign above magnitude, by column."""
    column = tl.arange(0, 4)
    byte = column % 2 * 2 + column // 2
    words = tl.expand_dims(words, -1)
    magnitudes = (words >> (8 * byte)) & 0x7F
    return magnitudes | ((words >> (8 * (byte ^ 1) + 7)) & 1) << 7


@triton.jit
def bfp4_nibbles(words):
    """Return int32 nibbles ``[..., 8]`` from words ``[...]``: value + 8, by column."""
    column = tl.arange(0, 8)
    half, part = column % 2 * 16, column // 2
    words = tl.expand_dims(words, -1)
    codes = (words >> (half + 4 * part)) & 0xF
    magnitudes = codes & 7
    # The signs of parts 1 and 3 are bits 15 and 7.
    is_negative = (words >> (half + (19 - 4 * part) % 16)) & 1
    signed = tl.where(is_negative != 0, 8 - magnitudes, 8 + magnitudes)
    return tl.where(part % 2 == 0, codes, signed)


@triton.jit
def mxfp4_codes(words):
    """Return int32 codes ``[..., 8]`` from words ``[...]``: sign above magnitude, by column."""
    column = tl.arange(0, 8)
    return float4_codes(tl.expand_dims(words, -1), column // 2, column % 2)


@triton.jit
def mxfp4_values(codes, exponents):
    """Return float32 values from 4-bit float codes and broadcast exponents."""
    upper, lower = codes >> 1 & 3, codes & 1
    doubled = tl.where(upper == 0, lower, (2 | lower) << (upper - tl.where(upper == 0, 0, 1)))
    signed = tl.where(codes & 8 != 0, -doubled, doubled)
    # A stored exponent is above 0: a subnormal scale could become 0.
    return signed.to(tl.float32) * (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_kernel(
    out_ptr,
    data_ptr,
    num_rows,
    num_columns,
    data_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    values = tl.load(data_ptr + row.to(tl.int64) * data_stride + column, mask=inside, other=0.0)
    target = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bfp8_kernel(
    out_ptr,
    data_ptr,
    words_ptr,
    num_rows,
    num_columns,
    num_column_tiles,
    out_stride,
    scale,
    TILES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    # An entry per exponent block: words of a lane's (half, row), then lanes, then (half, row).
    block = tl.arange(0, TILES * 128)
    tile, place = tl.program_id(1) * TILES + block // 128, block % 128
    piece, lane = place // 32, place % 32
    source = tl.program_id(0).to(tl.int64) * num_column_tiles + tile
    is_there = tile < num_column_tiles
    words = source * (BFP8_BYTES // 4) + place * 4
    words = words_ptr + words[:, None] + tl.arange(0, 4)[None, :]
    words = tl.load(words, mask=is_there[:, None], other=0)
    source = data_ptr + source * BFP8_BYTES + BFP8_EXPONENTS
    exponents = tl.load(source + lane * 4 + piece, mask=is_there, other=64)
    values = bfp8_values(bfp8_codes(words).reshape(TILES * 128, 16), exponents[:, None])
    element = tl.arange(0, 16)[None, :]
    row = tl.program_id(0) * 16 + piece % 2 * 8 + lane // 4
    column = (tile * 128 + piece // 2 * 64 + lane % 4 * 16)[:, None] + element
    target = out_ptr + row.to(tl.int64)[:, None] * out_stride + column
    inside = (row < num_rows)[:, None] & (column < num_columns)
    tl.store(target, (values * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bfp4_kernel(
    out_ptr,
    data_ptr,
    words_ptr,
    num_rows,
    num_columns,
    num_column_tiles,
    out_stride,
    scale,
    TILES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    # An entry per word with eight nibbles: words (half, word) of a lane, then lanes, then rows.
    word = tl.arange(0, TILES * 256)
    tile, place = tl.program_id(1) * TILES + word // 256, word % 256
    side, lane, half = place // 128, place % 128 // 4, place % 4 // 2
    source = tl.program_id(0).to(tl.int64) * num_column_tiles + tile
    is_there = tile < num_column_tiles
    words = tl.load(words_ptr + source * (BFP4_BYTES // 4) + place, mask=is_there, other=0)
    source = data_ptr + source * BFP4_BYTES + BFP4_EXPONENTS
    exponents = tl.load(source + lane * 4 + half * 2 + side, mask=is_there, other=64)
    values = bfp4_values(bfp4_nibbles(words), exponents[:, None])
    row = tl.program_id(0) * 16 + side * 8 + lane // 4
    column = tile * 128 + half * 64 + lane % 4 * 16 + place % 2 * 8
    column = column[:, None] + tl.arange(0, 8)[None, :]
    target = out_ptr + row.to(tl.int64)[:, None] * out_stride + column
    inside = (row < num_rows)[:, None] & (column < num_columns)
    tl.store(target, (values * scale).to(out_ptr.dtype.element_ty), mask=inside)


def words_of(packed: PackedWeight) -> Tensor:
    """Return a packed weight's bytes as int32 words."""
    return packed.data.view(torch.int32)


def dequantise(out: Tensor, packed: PackedWeight) -> None:
    """Write the values of ``packed`` to ``out [num_rows, num_columns]``, bfloat16 or float32.

    Rows in ``out`` may have gaps, which are not written. Rows are aligned to 16 bytes, because
    Triton 3.6 always writes 16 bytes.
    """
    assert out.shape == (packed.num_rows, packed.num_columns) and out.stride(1) == 1
    assert out.stride(0) * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    if packed.format in CODED_TILES:
        decode_rows(out, packed)
        return
    if packed.format == "bf16":
        grid = (packed.num_row_tiles, cdiv(packed.num_columns, _TILES * TILE_COLUMNS))
        _bf16_kernel[grid](
            out,
            packed.data,
            *out.shape,
            packed.data.stride(0),
            out.stride(0),
            ROWS=TILE_ROWS,
            COLUMNS=_TILES * TILE_COLUMNS,
            **chained(out),
        )
        return
    grid = (packed.num_row_tiles, cdiv(packed.num_column_tiles, _TILES))
    sizes = (*out.shape, packed.num_column_tiles, out.stride(0), packed.scale)
    kernel = _bfp8_kernel if packed.kind == "bfp8" else _bfp4_kernel
    kernel[grid](out, packed.data, words_of(packed), *sizes, TILES=_TILES, **chained(out))
