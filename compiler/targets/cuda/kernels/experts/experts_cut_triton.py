"""Triton matmuls of small tiles of pairs.

Warps have segments of K, as in `gemv_triton`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import (
    ExpertEpilogue,
    ExpertOutput,
    ExpertPairs,
    pairs_at,
    store_pairs,
    tile_of,
)
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import (
    Operand,
    segment_sums,
)
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import lane_tokens, layout_of
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS, PackedWeight


@triton.jit
def _expert_linear_cut_kernel(
    out_ptr,
    x_ptr,
    words_ptr,
    order_ptr,
    tiles_ptr,
    num_rows,
    num_columns,
    num_steps,
    expert_tiles,
    num_tiles,
    top_k,
    out_stride,
    out_each,
    x_stride,
    x_each,
    scale,
    bias_ptr,
    limit,
    alpha,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, n) computes tile i of the expert of tile n."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert, first, end = tile_of(tiles_ptr, num_tiles)
    if expert >= 0:
        token, choice, is_pair = pairs_at(order_ptr, first + tl.arange(0, PAIRS), end, top_k)
        pairs = ExpertPairs(token, choice, is_pair)
        index = first + lane_tokens(PAIRS, SEGMENTS)
        own, own_choice, is_own = pairs_at(order_ptr, index, end, top_k)
        x = Operand(x_ptr + own * x_stride + own_choice * x_each, is_own, num_columns)
        at = expert * expert_tiles + tl.program_id(0)
        sums = segment_sums(words_ptr, x, at, num_steps, LAYOUT, SEGMENTS, PAIRS, IS_EVEN, CHAINED)
        out = ExpertOutput(out_ptr, out_stride, out_each, num_rows)
        last = ExpertEpilogue(bias_ptr, limit, alpha)
        sums, at = sums * scale, tl.program_id(0) * 16
        store_pairs(out, sums, pairs, at, last, expert, 16, PAIRS, SWIGLU, CLAMPED, CHAINED)


def cut_linear(
    num_tiles: int, arguments: dict[str, Any], packed: PackedWeight, *, segments: int
) -> None:
    """Launch the kernel with the common arguments of expert matmuls."""
    _expert_linear_cut_kernel[packed.num_row_tiles, num_tiles](
        words_ptr=words_of(packed),
        num_steps=packed.num_column_tiles,
        LAYOUT=layout_of(packed.format),
        SEGMENTS=segments,
        IS_EVEN=packed.num_columns % (TILE_COLUMNS * segments) == 0,
        num_warps=segments,
        **arguments,
    )
