"""Triton matmuls of small pair tiles, with separate programs for the shared expert.

Warps have segments of K, as in `gemv_triton`. Program (i, n) computes 16 rows for the expert in
tile n, or for the shared expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import (
    ExpertEpilogue,
    ExpertOutput,
    Shared,
    pairs_at,
    store_pairs,
    takes_shared,
    tile_of,
)
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import (
    Operand,
    OutputMatrix,
    segment_sums,
    store_rows,
)
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import lane_tokens, layout_of
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS, PackedWeight


class _SharedMatmul(NamedTuple):
    """The shared expert in a kernel. ``x`` is its first element."""

    out: Any
    x: Any
    x_stride: Any
    num_columns: Any
    num_steps: Any
    words_ptr: Any
    scale: Any


@triton.jit
def _shared_linear(
    shared,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute the shared expert's rows for all tokens."""
    out, tile, own = shared.out, tl.program_id(0), lane_tokens(TOKENS, SEGMENTS)
    pointers = shared.x + own.to(tl.int64) * shared.x_stride
    x = Operand(pointers, own < out.num_tokens, shared.num_columns)
    sums = segment_sums(
        shared.words_ptr, x, tile, shared.num_steps, LAYOUT, SEGMENTS, TOKENS, IS_EVEN, CHAINED
    )
    feature, token = tile * 16 + tl.arange(0, 16), tl.arange(0, TOKENS)
    sums *= shared.scale
    store_rows(out, None, sums, feature, token, 16, TOKENS, False, SWIGLU, CHAINED)


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
    x_stride,
    x_each,
    scale,
    bias_ptr,
    limit,
    alpha,
    shared_out_ptr,
    shared_x_ptr,
    shared_words_ptr,
    num_tokens,
    shared_rows,
    shared_columns,
    shared_steps,
    shared_out_stride,
    shared_x_stride,
    shared_scale,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    tile = tl.program_id(0)
    if shared_words_ptr is not None:  # noqa: SIM102 (a constant)
        if (tl.program_id(1) == num_tiles) & (tile * 16 < shared_rows):
            to = OutputMatrix(shared_out_ptr, shared_out_stride, num_tokens, shared_rows)
            of = shared_x_ptr, shared_x_stride, shared_columns, shared_steps
            shared = _SharedMatmul(to, of[0], of[1], of[2], of[3], shared_words_ptr, shared_scale)
            _shared_linear(shared, LAYOUT, SEGMENTS, PAIRS, IS_EVEN, SWIGLU, CHAINED)
    wait_for_inputs(CHAINED)
    if (tl.program_id(1) < num_tiles) & (tile < expert_tiles):
        expert, first, end = tile_of(tiles_ptr, num_tiles)
        if expert >= 0:
            pairs = pairs_at(order_ptr, first + tl.arange(0, PAIRS), end, top_k)
            own = pairs_at(order_ptr, first + lane_tokens(PAIRS, SEGMENTS), end, top_k)
            pointers = x_ptr + own.token * x_stride + own.choice * x_each
            x = Operand(pointers, own.is_pair, num_columns)
            at = expert * expert_tiles + tile
            sums = segment_sums(
                words_ptr, x, at, num_steps, LAYOUT, SEGMENTS, PAIRS, IS_EVEN, CHAINED
            )
            out, at = ExpertOutput(out_ptr, out_stride, num_rows, num_rows), tile * 16
            last, sums = ExpertEpilogue(bias_ptr, limit, alpha), sums * scale
            store_pairs(out, sums, pairs, at, last, expert, 16, PAIRS, SWIGLU, CLAMPED, CHAINED)


_SHARED = (
    *("shared_out_ptr", "shared_x_ptr", "shared_words_ptr", "num_tokens", "shared_rows"),
    *("shared_columns", "shared_steps", "shared_out_stride", "shared_x_stride", "shared_scale"),
)


def cut_linear(
    num_tiles: int,
    arguments: dict[str, Any],
    packed: PackedWeight,
    shared: Shared | None,
    *,
    segments: int,
) -> None:
    """Launch the kernel with the common arguments for expert matmuls."""
    weights, operands = [packed], dict.fromkeys(_SHARED)
    if shared is not None:
        own, out, x = shared.packed, shared.out, shared.x
        assert out is not None and takes_shared(own, packed) and len(x) == len(out)
        assert len(x) <= arguments["PAIRS"] and x.stride(1) == 1 == out.stride(1)
        weights.append(own)
        sizes = len(x), own.num_rows, own.num_columns, own.num_column_tiles
        strides = out.stride(0), x.stride(0), own.scale
        operands = dict(zip(_SHARED, (out, x, words_of(own), *sizes, *strides), strict=True))
    del arguments["out_each"]  # the results of a token are adjacent
    step = TILE_COLUMNS * segments
    grid = max(packed.num_row_tiles for packed in weights), num_tiles + (shared is not None)
    _expert_linear_cut_kernel[grid](
        words_ptr=words_of(packed),
        num_steps=packed.num_column_tiles,
        LAYOUT=layout_of(packed.format),
        SEGMENTS=segments,
        IS_EVEN=all(packed.num_columns % step == 0 for packed in weights),
        num_warps=segments,
        **arguments | operands,
    )
