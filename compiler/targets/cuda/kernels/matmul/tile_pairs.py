"""Tiles in block formats as bfloat16 pairs, in Triton. Excludes sums.

All steps are elementwise, or move values within a lane. So a lane loads the words for its own
elements in the matrix unit.
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
        tile: Words in a tile.
        half: Distance between halves.
        span: Words per block.
        exponents: First exponent word.
        lanes: Exponent words per row.
    """

    name: str
    tile: int
    half: int
    span: int
    exponents: int
    lanes: int


def layout_of(name: str) -> TileLayout | None:
    """Return a block format's layout, or None for bfloat16."""
    if name == "bf16":
        return None
    tile, lanes = tile_bytes(name) // 4, 2 if name == "mxfp4" else 4
    half, span = (256, 4) if name == "bfp8" else (2, 2)
    return TileLayout(name, tile, half, span, tile - 8 * lanes, lanes)


@triton.jit
def _factors_of(exponents, SHIFT: tl.constexpr, WORDS: tl.constexpr):
    """Return ``2 ** e`` as pairs ``[S, G, WORDS]`` from words ``[S, G, LANES]``."""
    S: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    LANES: tl.constexpr = exponents.shape[2]
    factors = ((exponents >> SHIFT) & 0xFF) * 0x00800080 + 0x3F803F80
    shape: tl.constexpr = (S, G, LANES, WORDS // LANES)
    return tl.broadcast_to(tl.expand_dims(factors, 3), shape).reshape(S, G, WORDS)


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
        bits = (moved & 0x000F000F) | 0x02800280
        # The factors times `-(2 ** -122 + 8 * 2 ** -129)`.
        addend = fused(factors, -0x7D777D78, addend, CHAINED)
    return fused(bits, factors, addend, CHAINED)


@triton.jit
def _half(words, factors, FORMAT: tl.constexpr, CHAINED: tl.constexpr):
    """Return all pairs ``[S, G, W, 2]`` or ``[S, G, W, 2, 2]`` in words ``[S, G, W]``."""
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
def pairs_of(
    words, last_words, exponents, SHIFT: tl.constexpr, LAYOUT: tl.constexpr, CHAINED: tl.constexpr
):
    """Return int32 pairs ``[S, G, 64]`` for both halves, in the order of `in_order_of_words`."""
    S: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    FORMAT: tl.constexpr = LAYOUT.name
    first = _half(words, _factors_of(exponents, SHIFT, W), FORMAT, CHAINED)
    last = _half(last_words, _factors_of(exponents, SHIFT + 16, W), FORMAT, CHAINED)
    pairs = tl.join(first, last)
    if FORMAT == "bfp8":
        pairs = tl.permute(pairs, (0, 1, 4, 3, 2))
    else:
        pairs = tl.permute(pairs, (0, 1, 5, 4, 3, 2))
    return pairs.reshape(S, G, 64)


@triton.jit
def in_order_of_words(x, SPAN: tl.constexpr):
    """Sort columns ``[S, 128, T]`` by half, pair in a word, block, word, and column in a pair."""
    S: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[2]
    sorted = tl.permute(x.reshape(S, 2, 4 * SPAN, 8 // SPAN, 2, T), (0, 1, 3, 2, 4, 5))
    return sorted.reshape(S, 128, T)


@triton.jit
def both_sides(top, low):
    """Return bfloat16 ``[S, 2 G, 2 W]`` from pairs ``[S, G, W]`` for rows g and g + 8."""
    S: tl.constexpr = top.shape[0]
    G: tl.constexpr = top.shape[1]
    W: tl.constexpr = top.shape[2]
    sides = tl.join(top, low).reshape(S, G // 8, 8, W, 2)
    return weights(tl.permute(sides, (0, 1, 4, 2, 3)).reshape(S, 2 * G, W))
