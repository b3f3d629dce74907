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
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import (
    layout_arguments,
    numbers,
    pairs,
    scales_of,
    spread,
    weights,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import product, store_rows
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOK, CODEBOOKS, CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

_TUNING = tuning()["matmul"]["coded"]


@triton.jit
def _load(
    data_ptr, words_ptr, half_words_ptr, source, index, word,
    LOW: tl.constexpr, HIGH: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """Return int32 code words and high bits. Without high bits both are the words."""
    at = tl.expand_dims(source // 4 + index, -1) + word
    words = tl.load(words_ptr + at)
    high_bits = words
    if HIGH:
        at = tl.expand_dims(source + EXTRAS + index * HIGH, -1) + word * HIGH
        high_bits = spread(data_ptr, half_words_ptr, at, HIGH)
    return words, high_bits


@triton.jit
def _totals(
    codes, x, minima, sums, UNIT: tl.constexpr, SUBTRACTS: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Return the column sums of ``x`` times the rows' minimums, divided by ``UNIT``."""
    ones = tl.full(codes.shape, 1.0, tl.bfloat16)
    totals = product(ones, x, tl.zeros_like(sums), CHAINED)
    return totals * tl.expand_dims(minima * (-1 / UNIT if SUBTRACTS else 1 / UNIT), -1)


@triton.jit
def _add_step(
    sums, x_ptr, data_ptr, words_ptr, halves_ptr, half_words_ptr, floats_ptr, pairs_ptr,
    source, lane, column, num_columns, is_token,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, MINIMUMS: tl.constexpr,
    UNIT: tl.constexpr, SUBTRACTS: tl.constexpr,
    EXTRAS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr, MINIMA: tl.constexpr,
    MINIMA_FACTORS: tl.constexpr, WORDS: tl.constexpr, IS_EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add the products for 128 columns, divided by ``UNIT``."""
    word, factors, minima_factors = tl.arange(0, WORDS), 1.0, 1.0
    if FACTOR:
        factors = numbers(data_ptr, halves_ptr, floats_ptr, source + FACTORS, lane, FACTOR)
        if MINIMUMS:
            minima_factors = numbers(
                data_ptr, halves_ptr, floats_ptr, source + MINIMA_FACTORS, lane, FACTOR
            )
    whole = tl.zeros_like(sums)
    for half in tl.static_range(2 if LOW == 8 else 16 // WORDS):
        index = lane * 16 + half * (256 if LOW == 8 else WORDS)
        words, high_bits = _load(
            data_ptr, words_ptr, half_words_ptr, source, index, word, LOW, HIGH, EXTRAS
        )
        for item in tl.static_range(2 if LOW == 8 else 4):
            start = 64 * half + 32 * item if LOW == 8 else 2 * WORDS * half + 32 * item
            inside = is_token if IS_EVEN else (column + start < num_columns) & is_token
            x = tl.load(x_ptr + column + start, mask=inside, other=0.0)
            codes = pairs(words, high_bits, pairs_ptr, item, LOW, HIGH, ZERO, VALUES, CHAINED)
            codes = weights(codes)
            if GROUP == 128:
                whole = product(codes, x, whole, CHAINED)
            else:
                group, at = start // GROUP * 16 + lane, source + SCALES
                scales = scales_of(
                    data_ptr, halves_ptr, floats_ptr, at, group, factors, SCALE, FACTOR
                )
                own = product(codes, x, tl.zeros_like(sums), CHAINED)
                sums += own * tl.expand_dims(scales, -1)
                if MINIMUMS:
                    minima = scales_of(
                        data_ptr, halves_ptr, floats_ptr, source + MINIMA, group, minima_factors,
                        SCALE, FACTOR,
                    )  # fmt: skip
                    sums += _totals(codes, x, minima, sums, UNIT, SUBTRACTS, CHAINED)
    if GROUP == 128:
        scales = numbers(data_ptr, halves_ptr, floats_ptr, source + SCALES, lane, SCALE)
        sums += whole * tl.expand_dims(scales, -1)
    return sums


@triton.jit
def _coded_kernel(
    out_ptr, x_ptr, data_ptr, words_ptr, halves_ptr, half_words_ptr, floats_ptr, pairs_ptr,
    bias_ptr, num_tokens, num_rows, num_columns, num_row_tiles, num_steps, out_stride, x_stride,
    LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, MINIMUMS: tl.constexpr,
    UNIT: tl.constexpr, SUBTRACTS: tl.constexpr,
    EXTRAS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr, MINIMA: tl.constexpr,
    MINIMA_FACTORS: tl.constexpr, BYTES: tl.constexpr, WORDS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, IS_EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    first_tile = tl.program_id(0) * (ROWS // 16)
    offset = first_tile.to(tl.int64) * num_steps * BYTES
    # Rows past the last tile repeat it; they are not stored.
    tile = (tl.minimum(feature // 16, num_row_tiles - 1) - first_tile) * num_steps
    lane, item = feature % 16, 0
    if PARTS > 1:
        item, tile, lane = tl.arange(0, PARTS)[:, None], tile[None, :], lane[None, :]
        sums = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
        column = item * 128 + tl.arange(0, 2 * WORDS)[None, :]
    else:
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        column = tl.arange(0, 2 * WORDS)
    column = tl.expand_dims(column, -1)
    is_token = token < num_tokens
    x_ptr += token.to(tl.int64) * x_stride
    for first in tl.range(0, num_steps, PARTS, num_stages=STAGES):
        # Parts past the last step find no columns.
        step = first + item if IS_EVEN else tl.minimum(first + item, num_steps - 1)
        sums = _add_step(
            sums, x_ptr, data_ptr + offset, words_ptr + offset // 4, halves_ptr + offset // 2,
            half_words_ptr + offset // 2, floats_ptr + offset // 4, pairs_ptr,
            (step + tile) * BYTES, lane, first * 128 + column, num_columns, is_token,
            LOW, HIGH, ZERO, VALUES, GROUP, SCALE, FACTOR, MINIMUMS, UNIT, SUBTRACTS,
            EXTRAS, SCALES, FACTORS, MINIMA, MINIMA_FACTORS, WORDS, IS_EVEN, CHAINED,
        )  # fmt: skip
    if PARTS > 1:
        sums = tl.sum(sums, axis=0)
    store_rows(
        out_ptr, bias_ptr, sums * UNIT, feature, token, num_rows, num_tokens, out_stride,
        ROWS, TOKENS, RESIDUAL, SWIGLU, CHAINED,
    )  # fmt: skip


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
    assert out.shape == (num_tokens, num_rows // 2 if swiglu else num_rows)
    assert x.shape[1] >= weight.num_columns and x.stride(1) == 1 and out.stride(1) == 1
    assert not swiglu or (weight.is_paired and not residual)
    how = choose_blocks(num_tokens, is_small_m=is_small_m)
    data, tile = weight.data, CODED_TILES[weight.format]
    values = _pair_values(weight.format, data.device) if tile.values == CODEBOOK else None
    grid = (triton.cdiv(num_rows, how.rows), triton.cdiv(num_tokens, how.tokens))
    _coded_kernel[grid](
        out, x, data, data.view(torch.int32), data.view(torch.float16), data.view(torch.int16),
        data.view(torch.float32), values, bias, num_tokens, num_rows, weight.num_columns,
        weight.num_row_tiles, weight.num_column_tiles,
        out.stride(0), x.stride(0), **layout_arguments(tile),
        PARTS=how.parts, ROWS=how.rows, TOKENS=how.tokens, STAGES=how.num_stages,
        IS_EVEN=weight.num_columns % (128 * how.parts) == 0, RESIDUAL=residual, SWIGLU=swiglu,
        num_warps=how.num_warps, num_stages=how.num_stages, **chained(out),
    )  # fmt: skip
