"""Steps of weight tiles as bfloat16 pairs, in Triton. Excludes sums.

A lane loads its elements in the matrix unit, 16 bytes at a time. All other steps are elementwise,
or move values within a lane, so values need no shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import (
    NO_ADDEND,
    float4_pairs,
    fused,
    weights,
)
from tilewright.compiler.targets.cuda.weights.packed_weight import tile_bytes


class TileLayout(NamedTuple):
    """A tile's layout as a compile-time argument. Sizes are in 32-bit words.

    Attributes:
        name: Storage format.
        tile: Words between steps.
        vectors: 16-byte loads of a lane for a side of a step.
        exponents: First exponent word.
        lanes: Exponent words for four lanes.
    """

    name: str
    tile: int
    vectors: int
    exponents: int
    lanes: int


def layout_of(name: str) -> TileLayout:
    """Return a format's layout. bf16 has its name alone: its values are copied whole."""
    if name == "bf16":
        return TileLayout(name, 0, 0, 0, 0)
    tile, lanes = tile_bytes(name) // 4, 2 if name == "mxfp4" else 4
    return TileLayout(name, tile, 2 if name == "bfp8" else 1, tile - 8 * lanes, lanes)


@triton.jit
def _mask_or(words, MASK: tl.constexpr, BITS: tl.constexpr, CHAINED: tl.constexpr):
    """Return ``words & MASK | BITS``. The compiler takes two instructions for two constants."""
    if CHAINED:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [words, MASK, BITS],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return (words & MASK) | BITS


@triton.jit
def _factors_of(exponents, SHIFT: tl.constexpr):
    """Return ``2 ** e`` as pairs ``[8 S, 8]`` from words ``[8 S, LANES]``."""
    ROWS: tl.constexpr = exponents.shape[0]
    LANES: tl.constexpr = exponents.shape[1]
    factors = ((exponents >> SHIFT) & 0xFF) * 0x00800080 + 0x3F803F80
    factors = tl.broadcast_to(tl.expand_dims(factors, 2), (ROWS, LANES, 8 // LANES))
    return factors.reshape(ROWS, 8)


@triton.jit
def _swapped(words, CHAINED: tl.constexpr):
    """Exchange the bytes in both halves of a word."""
    if CHAINED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x2301;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    return ((words >> 8) & 0x00FF00FF) | ((words << 8) & -0xFF0100)


@triton.jit
def _pairs(words, factors, INDEX: tl.constexpr, FORMAT: tl.constexpr, CHAINED: tl.constexpr):
    """Return the columns ``2 INDEX`` and ``2 INDEX + 1`` in all words as pairs.

    A code's bits are a subnormal bfloat16, or above ``2 ** -122``. The factors make them exact.
    """
    if FORMAT == "mxfp4":
        return fused(float4_pairs(words, INDEX), factors, NO_ADDEND, CHAINED)
    SWAPS: tl.constexpr = INDEX == 1 if FORMAT == "bfp8" else INDEX >= 2
    moved = _swapped(words, CHAINED) if SWAPS else words
    addend = -0x7FFF8000  # -0.0 in both halves
    if FORMAT == "bfp8":
        bits = moved & -0x7F807F81  # 0x807F807F
    elif INDEX % 2:
        bits = moved & -0x7F8F7F90  # 0x80708070
    else:
        bits = _mask_or(moved, 0x000F000F, 0x02800280, CHAINED)
        # The factors times `-(2 ** -122 + 8 * 2 ** -129)`.
        addend = fused(factors, -0x7D777D78, addend, CHAINED)
    return fused(bits, factors, addend, CHAINED)


@triton.jit
def _decoded(words, factors, FORMAT: tl.constexpr, CHAINED: tl.constexpr):
    """Return all pairs in words ``[8 S, 8]``: ``[8 S, 8, 2]`` for bfp8, else ``[8 S, 8, 2, 2]``."""
    pairs = tl.join(
        _pairs(words, factors, 0, FORMAT, CHAINED), _pairs(words, factors, 1, FORMAT, CHAINED)
    )
    if FORMAT != "bfp8":
        last = tl.join(
            _pairs(words, factors, 2, FORMAT, CHAINED), _pairs(words, factors, 3, FORMAT, CHAINED)
        )
        pairs = tl.join(pairs, last)
    return pairs


@triton.jit
def vector_pairs(
    words,
    exponents,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    FORMAT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return the pairs in words ``[8 S, 16]``.

    Halves are the first two and the last two of a lane's four words. ``FIRST`` and ``LAST`` are
    their first bits in ``exponents``.
    """
    ROWS: tl.constexpr = words.shape[0]
    first, last = tl.split(tl.permute(words.reshape(ROWS, 4, 2, 2), (0, 1, 3, 2)))
    first, last = first.reshape(ROWS, 8), last.reshape(ROWS, 8)
    first = _decoded(first, _factors_of(exponents, FIRST), FORMAT, CHAINED)
    last = _decoded(last, _factors_of(exponents, LAST), FORMAT, CHAINED)
    return tl.join(first, last)


@triton.jit
def load_words(words, mask, OTHER: tl.constexpr):
    """Return words that only this program reads."""
    return tl.load(words, mask=mask, other=OTHER, cache_modifier=".cg")


@triton.jit
def load_side(words, mask, OTHER: tl.constexpr, LAYOUT: tl.constexpr):
    """Return a side's vectors ``[8 S, 16]`` from pointers to their first words."""
    first = load_words(words, mask, OTHER)
    if LAYOUT.vectors == 1:
        return (first,)
    else:
        return first, load_words(words + 256, mask, OTHER)


@triton.jit
def pairs_of(vectors, exponents, SIDE: tl.constexpr, LAYOUT: tl.constexpr, CHAINED: tl.constexpr):
    """Return a side's int32 pairs ``[8 S, 64]`` in the order of `tokens_of`.

    ``SIDE`` is 0 for rows g, and 1 for rows g + 8.
    """
    FORMAT: tl.constexpr = LAYOUT.name
    SHIFT: tl.constexpr = 8 * SIDE
    if FORMAT == "bfp8":
        pairs = tl.join(
            vector_pairs(vectors[0], exponents, SHIFT, SHIFT, FORMAT, CHAINED),
            vector_pairs(vectors[1], exponents, SHIFT + 16, SHIFT + 16, FORMAT, CHAINED),
        )
    else:
        pairs = vector_pairs(vectors[0], exponents, SHIFT, SHIFT + 16, FORMAT, CHAINED)
    return tl.permute(pairs, (0, 4, 3, 2, 1)).reshape(pairs.shape[0], 64)


@triton.jit
def lane_tokens(TOKENS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the tokens ``[4 SEGMENTS TOKENS]`` for the rows of `lane_columns`.

    Lanes have eight tokens, warps have the segments.
    """
    index = tl.arange(0, 4 * SEGMENTS * TOKENS)
    return index // (32 * SEGMENTS) * 8 + index // 4 % 8


@triton.jit
def lane_columns(TOKENS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the columns ``[4 SEGMENTS TOKENS, 8]`` in ``x`` that lanes load first."""
    index = tl.arange(0, 4 * SEGMENTS * TOKENS)[:, None]
    first = index // 32 % SEGMENTS * 128 + index % 4 * 16
    return first + tl.arange(0, 8)[None, :]


@triton.jit
def _eight(x, mask, column, limit, OFFSET: tl.constexpr):
    if limit is not None:
        mask = mask & (column + OFFSET < limit)
    return tl.load(x + OFFSET, mask=mask, other=0.0)


@triton.jit
def tokens_of(x, mask, column, limit, SEGMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return bfloat16 ``[SEGMENTS, 128, TOKENS]`` from pointers to the columns of `lane_columns`.

    The columns are in the order of `pairs_of`. ``limit`` is None or the number of columns.
    """
    T: tl.constexpr = x.shape[0] // (32 * SEGMENTS)
    first = _eight(x, mask, column, limit, 0)
    first = tl.join(first, _eight(x, mask, column, limit, 8))
    last = _eight(x, mask, column, limit, 64)
    last = tl.join(last, _eight(x, mask, column, limit, 72))
    x = tl.join(first, last).reshape(T, SEGMENTS, 8, 4, 2, 2, 2, 2, 2)
    if LAYOUT.name == "bfp8":
        x = tl.permute(x, (1, 8, 7, 5, 3, 4, 6, 0, 2))
    else:
        x = tl.permute(x, (1, 8, 4, 5, 3, 7, 6, 0, 2))
    return x.reshape(SEGMENTS, 128, 8 * T)


@triton.jit
def both_sides(top, low):
    """Return bfloat16 ``[S, 16, 128]`` from pairs ``[8 S, 64]`` for rows g and g + 8."""
    S: tl.constexpr = top.shape[0] // 8
    sides = tl.permute(tl.join(top, low).reshape(S, 8, 64, 2), (0, 3, 1, 2))
    return weights(sides.reshape(S, 16, 64))
