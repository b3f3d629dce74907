"""Triton matmuls for small pair tiles, with separate programs for the shared expert.

Warps split K, as in `gemv_triton`. Program (i, n) computes 16 rows for the expert in
tile n, or for the shared expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

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
    copied_sums,
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


class _PairsMatmul(NamedTuple):
    """The experts in a kernel. ``x`` is the first element."""

    out: Any
    order: Any
    tiles: Any
    num_tiles: Any
    top_k: Any
    expert_tiles: Any
    x: Any
    x_stride: Any
    x_each: Any
    num_columns: Any
    num_steps: Any
    words_ptr: Any
    scale: Any
    epilogue: Any


@triton.jit
def _rows(ROWS: tl.constexpr, SEGMENTS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the ``x`` rows in `_sums` order."""
    return tl.arange(0, ROWS) if LAYOUT.name == "bf16" else lane_tokens(ROWS, SEGMENTS)


@triton.jit
def _sums(
    words_ptr,
    x,
    tile,
    num_steps,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Wait for inputs, and return float32 ``[16, TOKENS]`` for a tile."""
    if LAYOUT.name == "bf16":
        wait_for_inputs(CHAINED)
        sums = copied_sums(
            words_ptr, x, tile, num_steps, SEGMENTS, TOKENS, STAGES, IS_EVEN, CHAINED
        )
    else:
        sums = segment_sums(
            words_ptr, x, tile, num_steps, LAYOUT, SEGMENTS, TOKENS, IS_EVEN, CHAINED
        )
    return sums


@triton.jit
def _shared_linear(
    shared,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute the shared expert's rows for all tokens."""
    out, tile, own = shared.out, tl.program_id(0), _rows(TOKENS, SEGMENTS, LAYOUT)
    pointers = shared.x + own.to(tl.int64) * shared.x_stride
    x = Operand(pointers, own < out.num_tokens, shared.num_columns)
    sums = _sums(
        shared.words_ptr,
        x,
        tile,
        shared.num_steps,
        LAYOUT,
        SEGMENTS,
        TOKENS,
        STAGES,
        IS_EVEN,
        CHAINED,
    )
    feature, token = tile * 16 + tl.arange(0, 16), tl.arange(0, TOKENS)
    sums *= shared.scale
    store_rows(out, None, sums, feature, token, 16, TOKENS, False, SWIGLU, CHAINED)


@triton.jit
def _expert_linear(
    matmul,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute a tile for an expert's pairs. Unused tiles have no expert."""
    expert, first, end = tile_of(matmul.tiles, matmul.num_tiles)
    if expert >= 0:
        order, top_k, tile = matmul.order, matmul.top_k, tl.program_id(0)
        pairs = pairs_at(order, first + tl.arange(0, PAIRS), end, top_k)
        own = pairs_at(order, first + _rows(PAIRS, SEGMENTS, LAYOUT), end, top_k)
        pointers = matmul.x + own.token * matmul.x_stride + own.choice * matmul.x_each
        x = Operand(pointers, own.is_pair, matmul.num_columns)
        at, num_steps = expert * matmul.expert_tiles + tile, matmul.num_steps
        sums = _sums(
            matmul.words_ptr,
            x,
            at,
            num_steps,
            LAYOUT,
            SEGMENTS,
            PAIRS,
            STAGES,
            IS_EVEN,
            CHAINED,
        )
        sums, out, at, last = sums * matmul.scale, matmul.out, tile * 16, matmul.epilogue
        store_pairs(out, sums, pairs, at, last, expert, 16, PAIRS, SWIGLU, CLAMPED, CHAINED)


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
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    tile = tl.program_id(0)
    if not EARLY:
        wait_for_inputs(CHAINED)
    # Later launches may read the tiles early.
    release_dependents(CHAINED)
    if shared_words_ptr is not None:  # noqa: SIM102 (a constant)
        if (tl.program_id(1) == num_tiles) & (tile * 16 < shared_rows):
            to = OutputMatrix(shared_out_ptr, shared_out_stride, num_tokens, shared_rows)
            of = shared_x_ptr, shared_x_stride, shared_columns, shared_steps
            shared = _SharedMatmul(to, of[0], of[1], of[2], of[3], shared_words_ptr, shared_scale)
            _shared_linear(shared, LAYOUT, SEGMENTS, PAIRS, STAGES, IS_EVEN, SWIGLU, CHAINED)
    if (tl.program_id(1) < num_tiles) & (tile < expert_tiles):
        out = ExpertOutput(out_ptr, out_stride, num_rows, num_rows)
        operands = x_ptr, x_stride, x_each, num_columns, num_steps, words_ptr, scale
        pairs = out, order_ptr, tiles_ptr, num_tiles, top_k, expert_tiles
        matmul = _PairsMatmul(*pairs, *operands, ExpertEpilogue(bias_ptr, limit, alpha))
        _expert_linear(matmul, LAYOUT, SEGMENTS, PAIRS, STAGES, IS_EVEN, SWIGLU, CLAMPED, CHAINED)
    wait_for_inputs(CHAINED)


_SHARED = (
    *("shared_out_ptr", "shared_x_ptr", "shared_words_ptr", "num_tokens", "shared_rows"),
    *("shared_columns", "shared_steps", "shared_out_stride", "shared_x_stride", "shared_scale"),
)


def cut_linear(
    num_tiles: int,
    arguments: dict[str, Any],
    packed: PackedWeight,
    shared: Shared | None,
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
        operands = dict(zip(_SHARED, (out, x, _operand_of(own), *sizes, *strides), strict=True))
    del arguments["out_each"]  # the results of a token are adjacent
    segments, num_stages = arguments["SEGMENTS"], arguments["STAGES"]
    step = TILE_COLUMNS * segments
    grid = max(packed.num_row_tiles for packed in weights), num_tiles + (shared is not None)
    _expert_linear_cut_kernel[grid](
        words_ptr=_operand_of(packed),
        num_steps=packed.num_column_tiles,
        expert_tiles=packed.num_row_tiles,
        LAYOUT=layout_of(packed.format),
        IS_EVEN=all(packed.num_columns % step == 0 for packed in weights),
        num_warps=segments,
        num_stages=num_stages,
        **arguments | operands,
    )


def _operand_of(packed: PackedWeight) -> Tensor:
    """Return a weight's values, or its blocks as words."""
    return packed.data if packed.format == "bf16" else words_of(packed)
