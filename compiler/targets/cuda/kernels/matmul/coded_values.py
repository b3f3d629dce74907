"""Codes as numbers, in Triton: bfloat16 pairs in registers, and float32.

`coded_triton` and `coded_rows` have the kernels. `coded_tiles` defines the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.weights.coded_tiles import CodedTile

_FP16, _FP32, _U8, _I8, _E5M3 = (tl.constexpr(number) for number in range(1, 6))
_SCALES = {"": 0, "fp16": 1, "fp32": 2, "u8": 3, "i8": 4, "e5m3": 5}
_INTEGER, _FLOAT8, _CODEBOOK, FLOAT4 = (tl.constexpr(number) for number in range(4))
_VALUES = {"integer": 0, "e4m3": 1, "codebook": 2, "float4": 3}

# A word with a bfloat16 pair.
_ONES = tl.constexpr(0x3F803F80)
_HALVES = tl.constexpr(0x00010001)
NO_ADDEND = tl.constexpr(-0x7FFF8000)  # -0.0 in both halves


class CodedLayout(NamedTuple):
    """A tile's layout as a compile-time argument.

    Attributes:
        low_bits, high_bits, zero, group, has_minimums, subtracts: As in `CodedTile`.
        decoding: How codes become numbers. (Tuples of Triton have own ``values``.)
        scale, factor: Types of scales and of their factors. 0: no factors.
        unit: Divisor of integer codes.
        high_offset, scales, factors, minima, minima_factors: First bytes in a tile.
        num_bytes: Bytes in a tile.
        words: Words of a lane that a step decodes together.
    """

    low_bits: int
    high_bits: int
    zero: int
    decoding: int
    group: int
    scale: int
    factor: int
    has_minimums: bool
    unit: float
    subtracts: bool
    high_offset: int
    scales: int
    factors: int
    minima: int
    minima_factors: int
    num_bytes: int
    words: int


class CodedWeight(NamedTuple):
    """A weight's bytes in a kernel, as pointers by type. ``codebook`` is None or has its values."""

    data: Any
    words: Any
    halves: Any
    half_words: Any
    floats: Any
    codebook: Any


def typed_views(data: Tensor) -> tuple[Tensor, ...]:
    """Return a weight's bytes as arguments for the pointers of a `CodedWeight`."""
    types = torch.int32, torch.float16, torch.int16, torch.float32
    return data, *map(data.view, types)


@triton.jit
def fused(pairs, factor, addend, CHAINED: tl.constexpr):
    """Return ``pairs * factor + addend`` for int32 bfloat16 pairs. All results are exact.

    GPUs before compute capability 9.0 have no separate sum and product.
    """
    if CHAINED:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [pairs, factor, addend],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    factor, addend = pairs * 0 + factor, pairs * 0 + addend
    low = (pairs << 16).to(tl.float32, bitcast=True) * (factor << 16).to(tl.float32, bitcast=True)
    low += (addend << 16).to(tl.float32, bitcast=True)
    high = (pairs & -0x10000).to(tl.float32, bitcast=True)
    high *= (factor & -0x10000).to(tl.float32, bitcast=True)
    high += (addend & -0x10000).to(tl.float32, bitcast=True)
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def float4_pairs(words, INDEX: tl.constexpr):
    """Return int32 bfloat16 pairs of 4-bit floats ``INDEX`` in words, times ``2 ** -126``."""
    if INDEX == 3:
        bits = ((words << 2) & -0x7F3F7F40) | ((words >> 6) & 0x01000100)  # 0x80C080C0
    else:
        if INDEX == 1:
            words = words << 6
        elif INDEX == 2:
            words = ((words >> 4) & 0x0FFFFFFF) | (words << 28)
        bits = words & -0x7E3F7E40  # 0x81C081C0
    return bits


@triton.jit
def float4_codes(words, index, second):
    """Return int32 codes, the ``second`` of pair ``index`` in words."""
    bits = tl.where(index == 0, float4_pairs(words, 0), float4_pairs(words, 1))
    bits = tl.where(index == 2, float4_pairs(words, 2), bits)
    bits = tl.where(index == 3, float4_pairs(words, 3), bits) >> (16 * second)
    return ((bits >> 6) & 7) | ((bits >> 12) & 8)


@triton.jit
def scale_pairs(words, INDEX: tl.constexpr):
    """Return e5m3 scales of 32 columns as int32 pairs ``[..., 16]``, times ``2 ** 126``.

    ``words [..., 2]`` have the scales of both halves.
    """
    factors = tl.expand_dims(((words >> (8 * INDEX)) & 0xFF) * 0x00100010 + 0x6F806F80, -1)
    if len(words.shape) == 3:
        shape: tl.constexpr = (words.shape[0], words.shape[1], 2, 8)
        result = tl.broadcast_to(factors, shape).reshape(words.shape[0], words.shape[1], 16)
    else:
        matrix: tl.constexpr = (words.shape[0], 2, 8)
        result = tl.broadcast_to(factors, matrix).reshape(words.shape[0], 16)
    return result


@triton.jit
def pairs(
    words, high_bits, codebook, LANE: tl.constexpr, LAYOUT: tl.constexpr, CHAINED: tl.constexpr
):
    """Return int32 bfloat16 pairs: columns ``2 w`` and ``2 w + 1`` in a lane.

    Integer codes are divided by ``128`` (8 bits) or by ``2 ** (LOW + HIGH)``.
    """
    LOW: tl.constexpr = LAYOUT.low_bits
    HIGH: tl.constexpr = LAYOUT.high_bits
    if LAYOUT.decoding == _CODEBOOK:
        result = tl.load(codebook + ((words >> (8 * LANE)) & 0xFF))
    elif LAYOUT.decoding == _FLOAT8:
        moved = words >> (8 * LANE)
        bits = ((moved & 0x007F007F) << 4) | ((moved & 0x00800080) << 8)
        factor = 0x7B807B80  # `2 ** 120`
        result = fused(bits, factor, NO_ADDEND, CHAINED)
    elif LOW == 8:
        # `1 + (code & 127) / 128`, minus `1` or `2`.
        moved = words >> (8 * LANE)
        bits = (moved & 0x007F007F) | _ONES
        addend = (moved & 0x00800080) + (-0x407F4080)  # 0xBF80BF80
        result = fused(bits, _ONES, addend, CHAINED)
    else:
        # `1 + code / 2 ** (LOW + HIGH)`, minus `1 + zero / 2 ** (LOW + HIGH)`.
        bits = (
            words << (3 - HIGH - 4 * LANE)
            if 3 - HIGH > 4 * LANE
            else words >> (4 * LANE - (3 - HIGH))
        )
        bits = bits & (0x000F000F << (3 - HIGH))
        if HIGH:
            mask: tl.constexpr = ((1 << HIGH) - 1) * _HALVES
            bits = bits | (((high_bits >> (HIGH * LANE)) & mask) << (7 - HIGH))
        zero: tl.constexpr = (LAYOUT.zero << (7 - LOW - HIGH)) * _HALVES
        addend = zero + (-0x407F4080)
        result = fused(bits | _ONES, _ONES, addend, CHAINED)
    return result


@triton.jit
def weights(pairs):
    """Return bfloat16 ``[..., 2 W]`` from int32 pairs ``[..., W]``."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    joined = tl.join(low, high).to(tl.bfloat16, bitcast=True)
    if len(pairs.shape) == 3:
        result = joined.reshape(pairs.shape[0], pairs.shape[1], pairs.shape[2] * 2)
    else:
        result = joined.reshape(pairs.shape[0], pairs.shape[1] * 2)
    return result


@triton.jit
def numbers(weight, source, index, TYPE: tl.constexpr):
    """Return float32 numbers ``index`` from a ``TYPE`` array at byte ``source``."""
    if TYPE == _FP16:
        result = tl.load(weight.halves + source // 2 + index).to(tl.float32)
    elif TYPE == _FP32:
        result = tl.load(weight.floats + source // 4 + index)
    elif TYPE == _E5M3:
        bits = tl.load(weight.data + source + index % 32 * 4 + index // 32).to(tl.int32)
        result = ((bits << 20) + 0x30800000).to(tl.float32, bitcast=True)
    else:
        codes = tl.load(weight.data + source + index).to(tl.int32)
        if TYPE == _I8:
            result = ((codes ^ 0x80) - 0x80).to(tl.float32)
        else:
            result = codes.to(tl.float32)
    return result


@triton.jit
def spread(weight, source, HIGH: tl.constexpr):
    """Return int32 with a pair's high bits separated by 16 bits."""
    if HIGH == 1:
        bits = tl.load(weight.data + source).to(tl.int32)
        bits = bits | (bits << 12)
    else:
        bits = tl.load(weight.half_words + source // 2).to(tl.int32)
        bits = (bits & 0xFF) | ((bits & 0xFF00) << 8)
    return bits


@triton.jit
def scales_of(weight, source, index, factors, LAYOUT: tl.constexpr):
    """Return float32 scales or minimums ``index`` from an array at byte ``source``."""
    scales = numbers(weight, source, index, LAYOUT.scale)
    if LAYOUT.factor:
        scales *= factors
    return scales


@triton.jit
def code_values(codes, values_ptr, LAYOUT: tl.constexpr):
    """Return the exact float32 values before scales."""
    if LAYOUT.decoding == _INTEGER:
        values = (codes ^ 0x80) - 0x80 if LAYOUT.low_bits == 8 else codes - LAYOUT.zero
        values = values.to(tl.float32)
    elif LAYOUT.decoding == _FLOAT8:
        bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        values = tl.load(values_ptr + codes)
    return values


@triton.jit
def codes_of(weight, source, lane, column, LAYOUT: tl.constexpr):
    """Return the int32 codes at some columns. The tile begins at byte ``source``."""
    HIGH: tl.constexpr = LAYOUT.high_bits
    word, second = column % 32 // 2, column % 2
    if LAYOUT.low_bits == 8:
        word += column // 64 * 256
        codes = tl.load(weight.words + source // 4 + lane * 16 + word)
        codes = (codes >> (column // 32 % 2 * 8 + second * 16)) & 0xFF
    else:
        is_codebook: tl.constexpr = LAYOUT.decoding == _CODEBOOK
        nibble = column // 32 * 2 + second if is_codebook else column // 32 + 4 * second
        codes = tl.load(weight.words + source // 4 + lane * 16 + word)
        if LAYOUT.decoding == FLOAT4:
            codes = float4_codes(codes, column // 32, second)
        else:
            codes = (codes >> (4 * nibble)) & 0xF
    if HIGH:
        bits = spread(weight, source + LAYOUT.high_offset + (lane * 16 + word) * HIGH, HIGH)
        high = (bits >> (HIGH * (column // 32) + 16 * second)) & ((1 << HIGH) - 1)
        codes |= high << LAYOUT.low_bits
    return codes


def layout_of(tile: CodedTile) -> CodedLayout:
    """Return a tile's compile-time layout."""
    unit = 1.0
    if tile.values == "integer":
        unit = 128.0 if tile.low_bits == 8 else float(1 << tile.low_bits + tile.high_bits)
    high_offset, scales, factors, minima, minima_factors, num_bytes = tile.offsets
    return CodedLayout(
        low_bits=tile.low_bits,
        high_bits=tile.high_bits,
        zero=tile.zero,
        decoding=_VALUES[tile.values],
        group=tile.group,
        scale=_SCALES[tile.scale],
        factor=_SCALES[tile.factor],
        has_minimums=tile.has_minimums,
        unit=unit,
        subtracts=tile.subtracts,
        high_offset=high_offset,
        scales=scales,
        factors=factors,
        minima=minima,
        minima_factors=minima_factors,
        num_bytes=num_bytes,
        words=16 if tile.group >= 32 or tile.values == "float4" else 8,
    )
