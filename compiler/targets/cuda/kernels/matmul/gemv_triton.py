"""Matmul with a packed weight in Triton, for all formats, and for GPUs without CUDA C++ kernels.

Weights are the rows in ``tl.dot``. Tokens are its columns. A warp has a segment: every fourth tile
of 128 columns. A token's arithmetic does not depend on other tokens.
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
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import (
    both_sides,
    lane_columns,
    lane_tokens,
    layout_of,
    load_side,
    load_words,
    pairs_of,
    tokens_of,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS, PackedWeight

_TUNING = tuning()["matmul"]["triton"]


@triton.jit
def product(weights, x, sums, CHAINED: tl.constexpr):
    """Return ``sums + weights @ x``, multiplied in bfloat16 unless x is float32.

    Triton's interpreter would multiply bfloat16 factors as integers.
    """
    if not CHAINED or x.dtype == tl.float32:
        weights, x = weights.to(tl.float32), x.to(tl.float32)
    return tl.dot(weights, x, sums, input_precision="ieee")


class OutputMatrix(NamedTuple):
    """A matmul's output ``[tokens, rows]`` in a kernel."""

    ptr: Any
    stride: Any
    num_tokens: Any
    num_rows: Any


@triton.jit
def _store(out, values, feature, token, num_rows, RESIDUAL: tl.constexpr, CHAINED: tl.constexpr):
    """``values [rows, tokens]`` to ``out [tokens, rows]``."""
    target = out.ptr + token[None, :].to(tl.int64) * out.stride + feature[:, None]
    inside = (feature < num_rows)[:, None] & (token < out.num_tokens)[None, :]
    if RESIDUAL:
        values += tl.load(target, mask=inside, other=0.0)
    tl.store(target, rounded(values, out.ptr.dtype.element_ty, CHAINED), mask=inside)


@triton.jit
def store_rows(
    out,
    bias_ptr,
    sums,
    feature,
    token,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Write ``sums [rows, tokens]`` after the fused epilogue. ``out`` has the weight's rows."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + feature, mask=feature < out.num_rows, other=0.0)[:, None]
    if SWIGLU:
        # Row 16 p + 8 s + g to [p, g, token, s]: a gate and its up are adjacent.
        sides = tl.permute(sums.reshape(ROWS // 16, 2, 8, TOKENS), (0, 2, 3, 1))
        gate, up = tl.split(sides)
        sums = (gate * tl.sigmoid(gate) * up).reshape(ROWS // 2, TOKENS)
        feature = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        _store(out, sums, feature, token, out.num_rows // 2, False, CHAINED)
    else:
        _store(out, sums, feature, token, out.num_rows, RESIDUAL, CHAINED)


class Operand(NamedTuple):
    """The rows of ``x`` in a kernel: first elements, mask, and length."""

    ptr: Any
    is_token: Any
    num_columns: Any


class _TilePointers(NamedTuple):
    """A tile in a kernel: pointers ``[8 SEGMENTS, W]`` to the first steps of segments."""

    top: Any
    low: Any
    exponents: Any


@triton.jit
def _tile(words_ptr, tile, num_steps, LAYOUT: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the pointers to a tile of 16 rows."""
    segment = tl.arange(0, 8 * SEGMENTS)[:, None] // 8
    group, tile = tl.arange(0, 8 * SEGMENTS)[:, None] % 8, tile.to(tl.int64)
    word, lane = tl.arange(0, 16)[None, :], tl.arange(0, LAYOUT.lanes)[None, :]
    first = words_ptr + segment * LAYOUT.tile + tile * num_steps * LAYOUT.tile
    top = first + group * 16 + word
    exponents = first + LAYOUT.exponents + group * LAYOUT.lanes + lane
    return _TilePointers(top, top + 128, exponents)


@triton.jit
def _load(weights, offset, mask, IS_EVEN: tl.constexpr, LAYOUT: tl.constexpr):
    """Return a step's vectors of both sides, and its exponents. Zeros are for odd segments only."""
    OTHER: tl.constexpr = None if IS_EVEN else 0
    exponents = load_words(weights.exponents + offset, mask, OTHER)
    top = load_side(weights.top + offset, mask, OTHER, LAYOUT)
    return top, load_side(weights.low + offset, mask, OTHER, LAYOUT), exponents


@triton.jit
def segment_sums(
    words_ptr,
    x,
    tile,
    num_steps,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return float32 ``[16, TOKENS]`` for a tile of 16 rows.

    ``IS_EVEN``: all segments have whole tiles in all steps.
    The first weights are fetched before the wait for inputs.
    """
    weights = _tile(words_ptr, tile, num_steps, LAYOUT, SEGMENTS)
    segment = tl.arange(0, 8 * SEGMENTS)[:, None] // 8
    top, low, exponents = _load(weights, 0, segment < num_steps, IS_EVEN, LAYOUT)
    wait_for_inputs(CHAINED)
    column = lane_columns(TOKENS, SEGMENTS)
    own, mask = x.ptr[:, None] + column, x.is_token[:, None]
    sums = tl.zeros((SEGMENTS, 16, TOKENS), tl.float32)
    for first in tl.range(0, num_steps, SEGMENTS, num_stages=1):
        next = first + SEGMENTS
        # Segments after the last step have zeros. They find no columns.
        has_next = next < num_steps if IS_EVEN else next + segment < num_steps
        offset = next * LAYOUT.tile
        next_top, next_low, next_exponents = _load(weights, offset, has_next, IS_EVEN, LAYOUT)
        limit = None if IS_EVEN else x.num_columns - first * 128
        tokens = tokens_of(own + first * 128, mask, column, limit, SEGMENTS, LAYOUT)
        rows = both_sides(
            pairs_of(top, exponents, 0, LAYOUT, CHAINED),
            pairs_of(low, exponents, 1, LAYOUT, CHAINED),
        )
        sums = product(rows, tokens, sums, CHAINED)
        top, low, exponents = next_top, next_low, next_exponents
    return tl.sum(sums, axis=0)


@triton.jit
def _linear_kernel(
    out_ptr,
    x_ptr,
    words_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_steps,
    out_stride,
    x_stride,
    scale,
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
    feature = tile * 16 + tl.arange(0, 16)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    own = tl.program_id(1) * TOKENS + lane_tokens(TOKENS, SEGMENTS)
    x = Operand(x_ptr + own.to(tl.int64) * x_stride, own < num_tokens, num_columns)
    sums = segment_sums(words_ptr, x, tile, num_steps, LAYOUT, SEGMENTS, TOKENS, IS_EVEN, CHAINED)
    sums *= scale
    out = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows)
    store_rows(out, bias_ptr, sums, feature, token, 16, TOKENS, RESIDUAL, SWIGLU, CHAINED)


@triton.jit
def copied_sums(
    data_ptr,
    x,
    tile,
    num_steps,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute `segment_sums` for bfloat16 by asynchronous copies to shared memory.

    ``x`` has a pointer for each of its ``TOKENS`` rows.
    """
    data_ptr += tile.to(tl.int64) * (16 * num_steps * 128)
    own, is_token = x.ptr[None, None, :], x.is_token[None, None, :]
    segment, column = tl.arange(0, SEGMENTS)[:, None, None], tl.arange(0, 128)
    source = data_ptr + tl.arange(0, 16)[None, :, None] * (num_steps * 128) + column[None, None, :]
    sums = tl.zeros((SEGMENTS, 16, TOKENS), tl.float32)
    for first in tl.range(0, num_steps, SEGMENTS, num_stages=STAGES):
        step = first + segment
        channel = step * 128 + column[None, :, None]
        inside = is_token if IS_EVEN else (channel < x.num_columns) & is_token
        tokens = tl.load(own + channel, mask=inside, other=0.0)
        # Segments after the last step repeat it. They find no columns.
        step = step if IS_EVEN else tl.minimum(step, num_steps - 1)
        sums = product(tl.load(source + step * 128), tokens, sums, CHAINED)
    return tl.sum(sums, axis=0)


@triton.jit
def _linear_bf16_kernel(
    out_ptr,
    x_ptr,
    data_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_steps,
    out_stride,
    x_stride,
    SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    tile = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    x = Operand(x_ptr + token.to(tl.int64) * x_stride, token < num_tokens, num_columns)
    wait_for_inputs(CHAINED)
    sums = copied_sums(data_ptr, x, tile, num_steps, SEGMENTS, TOKENS, STAGES, IS_EVEN, CHAINED)
    feature = tile * 16 + tl.arange(0, 16)
    out = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows)
    store_rows(out, bias_ptr, sums, feature, token, 16, TOKENS, RESIDUAL, SWIGLU, CHAINED)


def check_operands(
    out: Tensor, x: Tensor, packed: PackedWeight, *, residual: bool, swiglu: bool
) -> None:
    """Check the shapes and strides of a matmul's operands, as in `linear`."""
    num_rows = packed.num_rows
    assert out.shape == (x.shape[0], num_rows // 2 if swiglu else num_rows)
    assert x.shape[1] >= packed.num_columns and x.stride(1) == 1 and out.stride(1) == 1
    assert not swiglu or (packed.is_paired and not residual)


def linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    swiglu: bool = False,
) -> None:
    """Compute ``out [M, N]`` from ``x [M, >= K]`` and a weight of N rows and K columns.

    Sums are float32.

    ``x`` is bfloat16. ``bias`` is float32 ``[N]``, in the packed order.
    ``out`` is float32 or bfloat16; with ``residual`` float32, and the product is added to it; with
    ``swiglu`` (of a paired weight) ``[M, N / 2]``, silu(gate) * up.
    Rows in ``x`` and ``out`` may have gaps.
    """
    num_tokens, num_rows = x.shape[0], packed.num_rows
    check_operands(out, x, packed, residual=residual, swiglu=swiglu)
    is_bf16 = packed.format == "bf16"
    segments, family = segments_of(packed), "bf16" if is_bf16 else "blocks"
    tokens = min(_TUNING["tokens"][family], block_of(num_tokens, minimum=8))
    grid = (packed.num_row_tiles, cdiv(num_tokens, tokens))
    arguments: dict[str, Any] = {
        **{"out_ptr": out, "x_ptr": x, "bias_ptr": bias},
        **{"num_tokens": num_tokens, "num_rows": num_rows, "num_columns": packed.num_columns},
        **{"num_steps": packed.num_column_tiles, "out_stride": out.stride(0)},
        **{"x_stride": x.stride(0)},
        **{"SEGMENTS": segments, "TOKENS": tokens},
        **{"IS_EVEN": packed.num_columns % (TILE_COLUMNS * segments) == 0},
        **{"RESIDUAL": residual, "SWIGLU": swiglu, "num_warps": segments},
        **chained(out),
    }
    if is_bf16:
        is_large = packed.num_rows >= _TUNING["min_large_rows"]
        stages = _TUNING["num_stages"]["large" if is_large else "small"]
        how = {"STAGES": stages, "num_stages": stages}
        _linear_bf16_kernel[grid](data_ptr=packed.data, **how, **arguments)
    else:
        how = {"words_ptr": words_of(packed), "LAYOUT": layout_of(packed.format)}
        _linear_kernel[grid](**how, scale=packed.scale, **arguments)


def segments_of(packed: PackedWeight) -> int:
    """Return the segments of K for a program, with a warp each. They do not depend on tokens."""
    segments = _TUNING["segments"]
    if packed.format == "bf16":
        return int(segments["bf16"])
    if packed.num_rows >= _TUNING["min_large_rows"]:
        return int(segments["large"])
    return int(segments["long" if packed.num_columns >= _TUNING["min_long_columns"] else "small"])
