"""Matmul with a weight in code tiles, in Triton: codes become bfloat16 in registers.

A group's products are summed in float32 and multiplied by the group's scale. The arithmetic for a
token does not depend on another token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.matmul import coded_cut_triton
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import (
    FLOAT4,
    NO_ADDEND,
    CodedWeight,
    float4_pairs,
    fused,
    layout_of,
    numbers,
    pairs,
    scale_pairs,
    scales_of,
    spread,
    typed_views,
    weights,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import (
    Operand,
    OutputMatrix,
    check_operands,
    product,
    store_rows,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOK, CODEBOOKS, CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

_TUNING = tuning()["matmul"]["coded"]


@triton.jit
def _load(weight, source, index, LAYOUT: tl.constexpr):
    """Return int32 code words and high bits. Without high bits both are the words."""
    HIGH: tl.constexpr = LAYOUT.high_bits
    word = tl.arange(0, LAYOUT.words)
    at = tl.expand_dims(source // 4 + index, -1) + word
    words = tl.load(weight.words + at)
    high_bits = words
    if HIGH:
        at = tl.expand_dims(source + LAYOUT.high_offset + index * HIGH, -1) + word * HIGH
        high_bits = spread(weight, at, HIGH)
    return words, high_bits


@triton.jit
def _totals(codes, x, minima, sums, LAYOUT: tl.constexpr, CHAINED: tl.constexpr):
    """Return the column sums of ``x`` times the rows' minimums, divided by the unit."""
    ones = tl.full(codes.shape, 1.0, tl.bfloat16)
    totals = product(ones, x, tl.zeros_like(sums), CHAINED)
    factor: tl.constexpr = -1 / LAYOUT.unit if LAYOUT.subtracts else 1 / LAYOUT.unit
    return totals * tl.expand_dims(minima * factor, -1)


@triton.jit
def _add_group(
    sums,
    codes,
    x,
    weight,
    source,
    group,
    factors,
    minima_factors,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add a group's products times its scale, and its minimums."""
    scales = scales_of(weight, source + LAYOUT.scales, group, factors, LAYOUT)
    own = product(codes, x, tl.zeros_like(sums), CHAINED)
    sums += own * tl.expand_dims(scales, -1)
    if LAYOUT.has_minimums:
        minima = scales_of(weight, source + LAYOUT.minima, group, minima_factors, LAYOUT)
        sums += _totals(codes, x, minima, sums, LAYOUT, CHAINED)
    return sums


@triton.jit
def _add_step(
    sums,
    operand,
    weight,
    source,
    lane,
    column,
    LAYOUT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add the products for 128 columns, divided by the unit."""
    LOW: tl.constexpr = LAYOUT.low_bits
    WORDS: tl.constexpr = LAYOUT.words
    GROUP: tl.constexpr = LAYOUT.group
    factors, minima_factors = 1.0, 1.0
    if LAYOUT.factor:
        factors = numbers(weight, source + LAYOUT.factors, lane, LAYOUT.factor)
        if LAYOUT.has_minimums:
            minima_factors = numbers(weight, source + LAYOUT.minima_factors, lane, LAYOUT.factor)
    whole = tl.zeros_like(sums)
    if LAYOUT.decoding == FLOAT4:
        at = tl.expand_dims((source + LAYOUT.scales) // 4 + lane, -1) + tl.arange(0, 2) * 16
        scale_words = tl.load(weight.words + at)
    for half in tl.static_range(2 if LOW == 8 else 16 // WORDS):
        index = lane * 16 + half * (256 if LOW == 8 else WORDS)
        words, high_bits = _load(weight, source, index, LAYOUT)
        for item in tl.static_range(2 if LOW == 8 else 4):
            start = 64 * half + 32 * item if LOW == 8 else 2 * WORDS * half + 32 * item
            inside = operand.is_token
            if not IS_EVEN:
                inside = (column + start < operand.num_columns) & operand.is_token
            x = tl.load(operand.ptr + column + start, mask=inside, other=0.0)
            if LAYOUT.decoding == FLOAT4:
                factors = scale_pairs(scale_words, item)
                codes = fused(float4_pairs(words, item), factors, NO_ADDEND, CHAINED)
            else:
                codes = pairs(words, high_bits, weight.codebook, item, LAYOUT, CHAINED)
            codes = weights(codes)
            if LAYOUT.decoding == FLOAT4:
                sums = product(codes, x, sums, CHAINED)
            elif GROUP == 128:
                whole = product(codes, x, whole, CHAINED)
            else:
                group = start // GROUP * 16 + lane
                sums = _add_group(
                    sums, codes, x, weight, source, group, factors, minima_factors, LAYOUT, CHAINED
                )
    if GROUP == 128:
        scales = numbers(weight, source + LAYOUT.scales, lane, LAYOUT.scale)
        sums += whole * tl.expand_dims(scales, -1)
    return sums


@triton.jit
def _segments(
    tile,
    lane,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return segments, tiles, lanes, columns and zero sums. Several segments are a first axis."""
    segment = 0
    if SEGMENTS > 1:
        segment, tile, lane = tl.arange(0, SEGMENTS)[:, None], tile[None, :], lane[None, :]
        sums = tl.zeros((SEGMENTS, ROWS, TOKENS), tl.float32)
        column = segment * 128 + tl.arange(0, 2 * WORDS)[None, :]
    else:
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        column = tl.arange(0, 2 * WORDS)
    return segment, tile, lane, tl.expand_dims(column, -1), sums


@triton.jit
def _coded_kernel(
    out_ptr,
    x_ptr,
    data_ptr,
    words_ptr,
    halves_ptr,
    half_words_ptr,
    floats_ptr,
    pairs_ptr,
    second_scales_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_row_tiles,
    num_steps,
    out_stride,
    x_stride,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first_tile = tl.program_id(0) * (ROWS // 16)
    offset = first_tile.to(tl.int64) * num_steps * LAYOUT.num_bytes
    # Rows past the last tile repeat it; they are not stored.
    tile = (tl.minimum(feature // 16, num_row_tiles - 1) - first_tile) * num_steps
    segment, tile, lane, column, sums = _segments(
        tile, feature % 16, SEGMENTS, ROWS, TOKENS, LAYOUT.words
    )
    operand = Operand(x_ptr + token.to(tl.int64) * x_stride, token < num_tokens, num_columns)
    weight = CodedWeight(
        data_ptr + offset,
        words_ptr + offset // 4,
        halves_ptr + offset // 2,
        half_words_ptr + offset // 2,
        floats_ptr + offset // 4,
        pairs_ptr,
    )
    for first in tl.range(0, num_steps, SEGMENTS, num_stages=STAGES):
        # Parts past the last step find no columns.
        step = first + segment if IS_EVEN else tl.minimum(first + segment, num_steps - 1)
        source, own_column = (step + tile) * LAYOUT.num_bytes, first * 128 + column
        sums = _add_step(sums, operand, weight, source, lane, own_column, LAYOUT, IS_EVEN, CHAINED)
    if SEGMENTS > 1:
        sums = tl.sum(sums, axis=0)
    out, sums = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows), sums * LAYOUT.unit
    if second_scales_ptr is not None:
        factors = tl.load(second_scales_ptr + feature, mask=feature < num_rows, other=0.0)
        sums *= factors.to(tl.float32)[:, None]
    store_rows(out, bias_ptr, sums, feature, token, ROWS, TOKENS, RESIDUAL, SWIGLU, CHAINED)


@functools.cache
def _pair_values(format_name: str, device: torch.device) -> Tensor:
    """Return int32 ``[256]``: a byte's bfloat16 values, the low nibble first."""
    values = torch.tensor(CODEBOOKS[format_name], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)
    return pairs.view(torch.int32).flatten().to(device)


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """A program's K parts, rows and tokens, its warps, and its pipeline stages."""

    parts: int
    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def choose_blocks(num_tokens: int, *, is_small_m: bool | None = None) -> CodedBlocks:
    """Return the blocks for ``num_tokens``. ``is_small_m`` is as in `linear`."""
    small_m, large_m = _TUNING["small_m"], _TUNING["large_m"]
    if num_tokens <= small_m["max_rows"] if is_small_m is None else is_small_m:
        tokens = 8 if num_tokens <= 8 else 16
        parts = small_m["parts"]
        return CodedBlocks(parts, small_m["rows"], tokens, parts, small_m["num_stages"])
    is_large = is_small_m is None and num_tokens >= large_m["min_large"]
    rows, tokens, num_warps, num_stages = large_m["large" if is_large else "small"]
    tokens = tokens if is_small_m is False else min(tokens, block_of(num_tokens))
    return CodedBlocks(1, rows, tokens, num_warps, num_stages)


def linear(
    out: Tensor,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    swiglu: bool = False,
    is_small_m: bool | None = None,
) -> None:
    """Write ``out [M, N]`` for bfloat16 ``x [M, >= K]`` and a weight in code tiles.

    ``bias`` is float32 ``[N]``, in tile order. ``out`` is float32 or bfloat16. With ``residual`` it
    is float32 and the product is added.
    With ``swiglu`` the weight is paired and it is ``[M, N / 2]``.

    Args:
        is_small_m: Whether warps split K. With equal ``is_small_m``, the bits of a token do not
            depend on the number of tokens. None: the faster kernel.
    """
    num_tokens, num_rows = x.shape[0], weight.num_rows
    check_operands(out, x, weight, residual=residual, swiglu=swiglu)
    how = choose_blocks(num_tokens, is_small_m=is_small_m)
    if how.parts > 1 and coded_cut_triton.takes(weight):
        coded_cut_triton.linear(out, x, weight, bias=bias, residual=residual, swiglu=swiglu)
        return
    data, tile = weight.data, CODED_TILES[weight.format]
    values = _pair_values(weight.format, data.device) if tile.values == CODEBOOK else None
    grid = (cdiv(num_rows, how.rows), cdiv(num_tokens, how.tokens))
    _coded_kernel[grid](
        out,
        x,
        *typed_views(data),
        values,
        weight.second_scales,
        bias,
        num_tokens,
        num_rows,
        weight.num_columns,
        weight.num_row_tiles,
        weight.num_column_tiles,
        out.stride(0),
        x.stride(0),
        LAYOUT=layout_of(tile),
        SEGMENTS=how.parts,
        ROWS=how.rows,
        TOKENS=how.tokens,
        STAGES=how.num_stages,
        IS_EVEN=weight.num_columns % (128 * how.parts) == 0,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        **chained(out),
    )
