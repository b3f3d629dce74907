"""Matmul with code tiles in Triton for small batches: weights go from memory to registers.

Warps split K, as in `gemv_triton`. A lane loads its own elements in the matrix unit, with 16-byte
loads. Column blocks have separate products, because scales multiply sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    typed_views,
    weights,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import (
    OutputMatrix,
    product,
    segments_of,
    store_rows,
)
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import lane_tokens, load_words
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOK, CODED_TILES, CodedTile
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS, PackedWeight

MAX_TOKENS = 32
"""Maximum tokens per program."""


def takes_tile(tile: CodedTile) -> bool:
    """Return whether the kernel reads a tile: codes and scales only."""
    is_plain = not (tile.high_bits or tile.has_minimums or tile.factor)
    return is_plain and tile.values != CODEBOOK and tile.num_bytes % 16 == 0


def takes(weight: PackedWeight) -> bool:
    """Return whether the kernel reads the weight's format."""
    return takes_tile(CODED_TILES[weight.format])


@triton.jit
def _load_step(words, mask, IS_EVEN: tl.constexpr, LAYOUT: tl.constexpr):
    """Return a step's words for both sides, twice for 8-bit codes."""
    OTHER: tl.constexpr = None if IS_EVEN else 0
    top, low = load_words(words, mask, OTHER), load_words(words + 128, mask, OTHER)
    if LAYOUT.low_bits == 8:
        words += 256
        return top, low, load_words(words, mask, OTHER), load_words(words + 128, mask, OTHER)
    else:
        return top, low, top, low


@triton.jit
def _in_lanes(pairs):
    """Return int32 pairs ``[8 S, 16]`` in `_tokens` order."""
    ROWS: tl.constexpr = pairs.shape[0]
    first, last = tl.split(tl.permute(pairs.reshape(ROWS, 4, 2, 2), (0, 1, 3, 2)))
    both = tl.join(first.reshape(ROWS, 8), last.reshape(ROWS, 8))
    return tl.permute(both, (0, 2, 1)).reshape(ROWS, 16)


@triton.jit
def _rows(top, low):
    """Return bfloat16 ``[S, 16, 32]`` from both sides, pairs ``[8 S, 16]``."""
    S: tl.constexpr = top.shape[0] // 8
    both = tl.join(_in_lanes(top), _in_lanes(low))
    sides = tl.permute(both.reshape(S, 8, 16, 2), (0, 3, 1, 2))
    return weights(sides.reshape(S, 16, 16))


@triton.jit
def _block_rows(
    words, scale_words, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, CHAINED: tl.constexpr
):
    """Return a column block's values, bfloat16 ``[S, 16, 32]``."""
    IS_BYTES: tl.constexpr = LAYOUT.low_bits == 8
    INDEX: tl.constexpr = BLOCK % 2 if IS_BYTES else BLOCK
    HALF: tl.constexpr = BLOCK // 2 * 2 if IS_BYTES else 0
    top, low = words[HALF], words[HALF + 1]
    if LAYOUT.decoding == FLOAT4:
        top_factors = scale_pairs(scale_words[0], INDEX)
        low_factors = scale_pairs(scale_words[1], INDEX)
        top = fused(float4_pairs(top, INDEX), top_factors, NO_ADDEND, CHAINED)
        low = fused(float4_pairs(low, INDEX), low_factors, NO_ADDEND, CHAINED)
    else:
        top = pairs(top, top, None, INDEX, LAYOUT, CHAINED)
        low = pairs(low, low, None, INDEX, LAYOUT, CHAINED)
    return _rows(top, low)


@triton.jit
def _tokens(x, SEGMENTS: tl.constexpr):
    """Return bfloat16 ``[SEGMENTS, 32, TOKENS]`` from lane columns ``[.., 8]``."""
    T: tl.constexpr = x.shape[0] // (32 * SEGMENTS)
    x = tl.permute(x.reshape(T, SEGMENTS, 8, 4, 2, 2, 2), (1, 4, 3, 5, 6, 0, 2))
    return x.reshape(SEGMENTS, 32, 8 * T)


@triton.jit
def _step(
    sums,
    words,
    x,
    weight,
    source,
    scale_words,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add a step's products, divided by the unit. ``x`` has its column blocks."""
    feature = tl.arange(0, 16)[None, :]
    whole = tl.zeros_like(sums)
    for block in tl.static_range(4):
        rows = _block_rows(words, scale_words, block, LAYOUT, CHAINED)
        tokens = _tokens(x[block], SEGMENTS)
        if LAYOUT.group == 32:
            own = product(rows, tokens, tl.zeros_like(sums), CHAINED)
            scales = numbers(weight, source + LAYOUT.scales, block * 16 + feature, LAYOUT.scale)
            sums += own * tl.expand_dims(scales, -1)
        elif LAYOUT.decoding == FLOAT4:
            sums = product(rows, tokens, sums, CHAINED)
        else:
            whole = product(rows, tokens, whole, CHAINED)
    if LAYOUT.group == 128:
        scales = numbers(weight, source + LAYOUT.scales, feature, LAYOUT.scale)
        sums += whole * tl.expand_dims(scales, -1)
    return sums


@triton.jit
def _load_tokens(own, mask, column, limit):
    """Return a step's tokens by column block."""
    inside = mask, mask, mask, mask
    if limit is not None:
        inside = (
            mask & (column < limit),
            mask & (column + 32 < limit),
            mask & (column + 64 < limit),
            mask & (column + 96 < limit),
        )
    return (
        tl.load(own, mask=inside[0], other=0.0),
        tl.load(own + 32, mask=inside[1], other=0.0),
        tl.load(own + 64, mask=inside[2], other=0.0),
        tl.load(own + 96, mask=inside[3], other=0.0),
    )


class _LaneTokens(NamedTuple):
    """Tokens in a kernel: lane pointers, mask, column, and length."""

    ptr: Any
    mask: Any
    column: Any
    num_columns: Any


@triton.jit
def _tokens_of(x_ptr, x_stride, num_tokens, num_columns, T: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the pointers to a program's ``T`` tokens."""
    token = tl.program_id(1) * T + lane_tokens(T, SEGMENTS)
    index = tl.arange(0, 4 * SEGMENTS * T)[:, None]
    column = index // 32 % SEGMENTS * 128 + index % 4 * 8 + tl.arange(0, 8)[None, :]
    pointers = x_ptr + token.to(tl.int64)[:, None] * x_stride + column
    return _LaneTokens(pointers, (token < num_tokens)[:, None], column, num_columns)


@triton.jit
def _sums(
    weight,
    tokens,
    num_steps,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return float32 ``[16, TOKENS]`` divided by the unit.

    The first weights are fetched before the wait for inputs.
    """
    WORDS: tl.constexpr = LAYOUT.num_bytes // 4
    OTHER: tl.constexpr = None if IS_EVEN else 0
    lane = tl.arange(0, 8 * SEGMENTS)[:, None]
    segment, parts = lane // 8, tl.arange(0, SEGMENTS)[:, None]
    own_words = weight.words + segment * WORDS
    words_at = own_words + lane % 8 * 16 + tl.arange(0, 16)[None, :]
    scales_at = own_words + LAYOUT.scales // 4 + lane % 8 + tl.arange(0, 2)[None, :] * 16
    words = _load_step(words_at, segment < num_steps, IS_EVEN, LAYOUT)
    wait_for_inputs(CHAINED)
    sums = tl.zeros((SEGMENTS, 16, TOKENS), tl.float32)
    for first in tl.range(0, num_steps, SEGMENTS, num_stages=1):
        next = first + SEGMENTS
        # Segments after the last step have zeros. They find no columns.
        has_next = next < num_steps if IS_EVEN else next + segment < num_steps
        following = _load_step(words_at + next * WORDS, has_next, IS_EVEN, LAYOUT)
        limit = None if IS_EVEN else tokens.num_columns - first * 128
        x = _load_tokens(tokens.ptr + first * 128, tokens.mask, tokens.column, limit)
        step = first + parts if IS_EVEN else tl.minimum(first + parts, num_steps - 1)
        scale_words = words[0], words[0]
        if LAYOUT.decoding == FLOAT4:
            is_step = None if IS_EVEN else first + segment < num_steps
            at = scales_at + first * WORDS
            scale_words = load_words(at, is_step, OTHER), load_words(at + 8, is_step, OTHER)
        source = step * LAYOUT.num_bytes
        sums = _step(sums, words, x, weight, source, scale_words, LAYOUT, SEGMENTS, CHAINED)
        words = following
    return tl.sum(sums, axis=0)


@triton.jit
def _coded_cut_kernel(
    out_ptr,
    x_ptr,
    data_ptr,
    words_ptr,
    halves_ptr,
    half_words_ptr,
    floats_ptr,
    second_scales_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_steps,
    out_stride,
    x_stride,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    tile = tl.program_id(0)
    offset = tile.to(tl.int64) * num_steps * LAYOUT.num_bytes
    weight = CodedWeight(
        data_ptr + offset,
        words_ptr + offset // 4,
        halves_ptr + offset // 2,
        half_words_ptr + offset // 2,
        floats_ptr + offset // 4,
        None,
    )
    tokens = _tokens_of(x_ptr, x_stride, num_tokens, num_columns, TOKENS, SEGMENTS)
    sums = _sums(weight, tokens, num_steps, LAYOUT, SEGMENTS, TOKENS, IS_EVEN, CHAINED)
    sums *= LAYOUT.unit
    feature, token = tile * 16 + tl.arange(0, 16), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if second_scales_ptr is not None:
        factors = tl.load(second_scales_ptr + feature, mask=feature < num_rows, other=0.0)
        sums *= factors.to(tl.float32)[:, None]
    out = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows)
    store_rows(out, bias_ptr, sums, feature, token, 16, TOKENS, RESIDUAL, SWIGLU, CHAINED)


def linear(
    out: Tensor,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    swiglu: bool = False,
) -> None:
    """Compute :func:`.coded_triton.linear` if `takes` is true.

    Token bits do not depend on the batch.
    """
    num_tokens, segments = len(x), segments_of(weight)
    tokens = min(MAX_TOKENS, block_of(num_tokens, minimum=8))
    grid = cdiv(weight.num_rows, 16), cdiv(num_tokens, tokens)
    sizes: dict[str, Any] = {
        "num_tokens": num_tokens,
        "num_rows": weight.num_rows,
        "num_columns": weight.num_columns,
        "num_steps": weight.num_column_tiles,
    }
    _coded_cut_kernel[grid](
        out,
        x,
        *typed_views(weight.data),
        weight.second_scales,
        bias,
        **sizes,
        out_stride=out.stride(0),
        x_stride=x.stride(0),
        LAYOUT=layout_of(CODED_TILES[weight.format]),
        SEGMENTS=segments,
        TOKENS=tokens,
        IS_EVEN=weight.num_columns % (TILE_COLUMNS * segments) == 0,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        num_warps=segments,
        **chained(out),
    )
