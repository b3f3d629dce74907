"""Matmul with a packed weight in Triton, for all formats, and for GPUs without CUDA C++ kernels.

Weights are the rows in ``tl.dot``. Tokens are its columns. A step is a tile with 128 columns, so a
token's arithmetic does not depend on other tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import (
    BFP4_BYTES,
    BFP4_EXPONENTS,
    BFP8_BYTES,
    BFP8_EXPONENTS,
    MXFP4_BYTES,
    bfp4_nibbles,
    bfp4_values,
    bfp8_codes,
    bfp8_values,
    mxfp4_codes,
    mxfp4_values,
    words_of,
)
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, PackedWeight

_MAX_TOKENS = 64  # a program's; more are in further programs, which read the weights again
_MIN_LARGE_ROWS = 8192  # weight rows from which a program has two tiles


@triton.jit
def tile_columns(IS_BFP4: tl.constexpr):
    """int32 ``[128]``: a tile's columns in memory order.

    The order in bfp4 and mxfp4 is t, half, word.
    """
    column = tl.arange(0, 128)
    if IS_BFP4:
        column = column // 16 % 2 * 64 + column // 32 * 16 + column % 16
    return column


@triton.jit
def tile_weights(
    data_ptr, words_ptr, feature, step, num_row_tiles, STEPS: tl.constexpr, KIND: tl.constexpr
):
    """bfloat16 ``[rows, 128]``: tile ``step``, columns in the order of `tile_columns`."""
    # Rows past the last tile repeat it; they are not stored.
    tile = tl.minimum(feature // 16, num_row_tiles - 1).to(tl.int64)
    if KIND == "bf16":
        source = (tile * 16 + feature % 16) * (STEPS * 128) + step * 128
        weights = tl.load(data_ptr + source[:, None] + tl.arange(0, 128)[None, :])
    else:
        tile = tile * STEPS + step
        side, group, block = feature % 16 // 8, feature % 8, tl.arange(0, 8)[None, :]
        if KIND == "bfp8":
            source = tile * (BFP8_BYTES // 4) + side * 128 + group * 16
            word = tl.arange(0, 32)[None, :]
            words = tl.load(words_ptr + source[:, None] + word // 16 * 256 + word % 16)
            source = tile * BFP8_BYTES + BFP8_EXPONENTS + group * 16 + side
            exponents = tl.load(data_ptr + source[:, None] + block % 4 * 4 + block // 4 * 2)
            codes = bfp8_codes(words).reshape(feature.shape[0], 8, 16)
            values = bfp8_values(codes, exponents[:, :, None])
        elif KIND == "mxfp4":
            source = tile * (MXFP4_BYTES // 4) + side * 128 + group * 16
            words = tl.load(words_ptr + source[:, None] + tl.arange(0, 16)[None, :])
            source = tile * MXFP4_BYTES + 1024 + group * 8 + side
            exponents = tl.load(data_ptr + source[:, None] + block // 4 * 4 + block % 2 * 2)
            codes = mxfp4_codes(words).reshape(feature.shape[0], 8, 16)
            values = mxfp4_values(codes, exponents[:, :, None])
        else:
            source = tile * (BFP4_BYTES // 4) + side * 128 + group * 16
            words = tl.load(words_ptr + source[:, None] + tl.arange(0, 16)[None, :])
            source = tile * BFP4_BYTES + BFP4_EXPONENTS + group * 16 + side
            exponents = tl.load(data_ptr + source[:, None] + block * 2)
            nibbles = bfp4_nibbles(words).reshape(feature.shape[0], 8, 16)
            values = bfp4_values(nibbles, exponents[:, :, None])
        weights = values.to(tl.bfloat16).reshape(feature.shape[0], 128)
    return weights


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
    out_stride,
    x_stride,
    scale,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[None, :]
    x_rows = x_ptr + token[None, :].to(tl.int64) * x_stride
    order = tile_columns(KIND == "bfp4")
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(STEPS):
        column = step * 128 + order[:, None]
        x = tl.load(x_rows + column, mask=(column < num_columns) & is_token, other=0.0)
        weights = tile_weights(data_ptr, words_ptr, feature, step, num_row_tiles, STEPS, KIND)
        sums = product(weights, x, sums, CHAINED)
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
    rows = TILE_ROWS if num_rows < _MIN_LARGE_ROWS else 2 * TILE_ROWS
    tokens = min(_MAX_TOKENS, block_of(num_tokens))
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_tokens, tokens))
    _linear_kernel[grid](
        out,
        x,
        packed.data,
        None if packed.kind == "bf16" else words_of(packed),
        bias,
        num_tokens,
        num_rows,
        packed.num_columns,
        packed.num_row_tiles,
        out.stride(0),
        x.stride(0),
        packed.scale,
        KIND=packed.kind,
        STEPS=packed.num_column_tiles,
        ROWS=rows,
        TOKENS=tokens,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        num_warps=4,
        num_stages=6 if rows == TILE_ROWS else 4,
        **chained(out),
    )
