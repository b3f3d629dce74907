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
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import (
    both_sides,
    in_order_of_words,
    layout_of,
    pairs_of,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    TILE_COLUMNS,
    TILE_ROWS,
    PackedWeight,
)

_TUNING = tuning()["matmul"]["triton"]


@triton.jit
def product(weights, x, sums, CHAINED: tl.constexpr):
    """``sums + weights @ x``, in bfloat16 unless x is float32.

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
    """A program's rows of ``x`` in a kernel: first elements, mask, and length."""

    ptr: Any
    is_token: Any
    num_columns: Any


@triton.jit
def _load(x, column, IS_EVEN: tl.constexpr):
    inside = x.is_token
    if not IS_EVEN:
        inside = (column < x.num_columns) & inside
    return tl.load(x.ptr + column, mask=inside, other=0.0)


@triton.jit
def _block_weights(words, of_words, of_exponents, LAYOUT: tl.constexpr, CHAINED: tl.constexpr):
    """Return the weights of tiles in a block format, from pointers to their first words."""
    exponents = tl.load(words + of_exponents)
    words += of_words
    top = pairs_of(tl.load(words), tl.load(words + LAYOUT.half), exponents, 0, LAYOUT, CHAINED)
    words += 128
    low = pairs_of(tl.load(words), tl.load(words + LAYOUT.half), exponents, 8, LAYOUT, CHAINED)
    return both_sides(top, low)


@triton.jit
def segment_sums(
    data_ptr,
    words_ptr,
    x,
    first_tile,
    num_tiles,
    num_steps,
    LAYOUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return float32 ``[ROWS, TOKENS]`` for the weight rows from row tile ``first_tile``.

    Rows after the last tile repeat it. ``IS_EVEN``: all segments have whole tiles in all steps.
    """
    segment, column = tl.arange(0, SEGMENTS)[:, None, None], tl.arange(0, 128)
    if LAYOUT is None:
        row = tl.minimum(tl.arange(0, ROWS), (num_tiles - first_tile) * 16 - 1)[None, :, None]
        source = data_ptr + first_tile.to(tl.int64) * (16 * num_steps * 128)
        source += row * (num_steps * 128) + column[None, None, :]
    else:
        SPAN: tl.constexpr = LAYOUT.span
        pair, word = tl.arange(0, ROWS // 2)[None, :, None], tl.arange(0, 4 * SPAN)[None, None, :]
        tile = tl.minimum(pair // 8, num_tiles - 1 - first_tile) * num_steps
        source = words_ptr + first_tile.to(tl.int64) * num_steps * LAYOUT.tile
        of_words = pair % 8 * 16 + word // SPAN * 4 + word % SPAN
        lane = tl.arange(0, LAYOUT.lanes)[None, None, :]
        of_exponents = LAYOUT.exponents + pair % 8 * LAYOUT.lanes + lane
    sums = tl.zeros((SEGMENTS, ROWS, TOKENS), tl.float32)
    for first in tl.range(0, num_steps, SEGMENTS, num_stages=STAGES):
        step = first + segment
        own = _load(x, step * 128 + column[None, :, None], IS_EVEN)
        # Segments after the last step repeat it. They find no columns.
        step = step if IS_EVEN else tl.minimum(step, num_steps - 1)
        if LAYOUT is None:
            weights = tl.load(source + step * 128)
        else:
            own = in_order_of_words(own, SPAN)
            words = source + (step + tile) * LAYOUT.tile
            weights = _block_weights(words, of_words, of_exponents, LAYOUT, CHAINED)
        sums = product(weights, own, sums, CHAINED)
    return tl.sum(sums, axis=0)


@triton.jit
def _linear_kernel(
    out_ptr,
    x_ptr,
    data_ptr,
    words_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_row_tiles,
    num_steps,
    out_stride,
    x_stride,
    scale,
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
    x_rows = x_ptr + token[None, None, :].to(tl.int64) * x_stride
    sums = segment_sums(
        data_ptr,
        words_ptr,
        Operand(x_rows, (token < num_tokens)[None, None, :], num_columns),
        tl.program_id(0) * (ROWS // 16),
        num_row_tiles,
        num_steps,
        LAYOUT,
        SEGMENTS,
        ROWS,
        TOKENS,
        STAGES,
        IS_EVEN,
        CHAINED,
    )
    sums *= scale
    out = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows)
    store_rows(out, bias_ptr, sums, feature, token, ROWS, TOKENS, RESIDUAL, SWIGLU, CHAINED)


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
    assert out.shape == (num_tokens, num_rows // 2 if swiglu else num_rows)
    assert x.shape[1] >= packed.num_columns and x.stride(1) == 1 and out.stride(1) == 1
    assert not swiglu or (packed.is_paired and not residual)
    family = "bf16" if packed.format == "bf16" else "blocks"
    is_large = family == "blocks" and (num_rows >= _TUNING["min_large_rows"] or num_tokens > 8)
    rows = 2 * TILE_ROWS if is_large else TILE_ROWS
    segments, stages = _TUNING["segments"], _TUNING["num_stages"]["large" if is_large else family]
    tokens = min(_TUNING["tokens"][family], max(8, triton.next_power_of_2(num_tokens)))
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens))
    _linear_kernel[grid](
        out,
        x,
        packed.data,
        None if family == "bf16" else words_of(packed),
        bias,
        num_tokens,
        num_rows,
        packed.num_columns,
        packed.num_row_tiles,
        packed.num_column_tiles,
        out.stride(0),
        x.stride(0),
        packed.scale,
        LAYOUT=layout_of(packed.format),
        SEGMENTS=segments,
        ROWS=rows,
        TOKENS=tokens,
        STAGES=stages,
        IS_EVEN=packed.num_columns % (TILE_COLUMNS * segments) == 0,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        num_warps=segments,
        num_stages=stages,
        **chained(out),
    )
