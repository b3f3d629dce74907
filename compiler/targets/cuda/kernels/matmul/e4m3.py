"""Conversion of rows to e4m3 codes on the device, and scaling of matmul results.

The bits are equal to :func:`..e4m3.round_rows`. A program converts a row. Codes are computed with
integers because Triton's interpreter cannot round to 8-bit floats.
"""

from __future__ import annotations

import torch
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
from tilewright.compiler.targets.cuda.weights.e4m3 import CODES

_MOST_BLOCK = 1024
ORDERED = 64
"""Columns that change places for :mod:`.gemm_block_e4m3`."""


@triton.jit
def e4m3_codes(x):
    """Return int32 codes for float32 ``x``, to nearest even. NaN for magnitudes above 448."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    nearest = bits + 0x7FFFF + ((bits >> 20) & 1)
    # The exponent bias differs by 120. Below `2 ** -6`, codes are multiples of `2 ** -9`.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    codes = tl.where(bits < 0x3C800000, small, (nearest >> 20) - 960)
    codes = tl.where(bits <= 0x43E00000, codes, 0x7F)
    return codes | (x.to(tl.int32, bitcast=True) < 0).to(tl.int32) << 7


@triton.jit
def position_of(column):
    """Return a column's position for gemm_block_e4m3.cu.

    In 64 columns, lane t decodes ``16 t .. 16 t + 15``: eight columns, then eight more. In
    both, even columns come first.
    """
    within = (column >> 3 & 1) * 32 + (column & 1) * 16 + (column >> 4 & 3) * 4 + (column >> 1 & 3)
    return (column & ~63) + within


@triton.jit
def _round_rows_kernel(
    out_ptr,
    scales_ptr,
    x_ptr,
    width,
    out_stride,
    x_stride,
    ARRANGED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x))
    field = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 7, 1)
    scale = (field << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - field) << 23).to(tl.float32, bitcast=True)
    codes = e4m3_codes(x * inverse)
    at = position_of(channel) if ARRANGED else channel
    tl.store(out_ptr + row * out_stride + at, codes.to(tl.uint8), mask=inside)
    tl.store(scales_ptr + row, tl.where(largest > 0, scale, 1.0))


def round_rows(x: Tensor, *, is_arranged: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes ``[M, K]`` and float32 powers of two ``[M, 1]`` for ``x [M, K]``.

    ``x`` is bfloat16 or float32, and may have gaps between rows. ``is_arranged``: codes are in
    the order for :mod:`.gemm_block_e4m3`. K then has whole 64 columns. The results are new tensors.
    """
    num_rows, width = x.shape
    assert x.stride(1) == 1 and not (is_arranged and width % ORDERED)
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = block_of(width)
    _round_rows_kernel[(num_rows,)](
        codes,
        scales,
        x,
        width,
        codes.stride(0),
        x.stride(0),
        ARRANGED=is_arranged,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **chained(x),
    )
    return codes.view(CODES), scales


@triton.jit
def _scale_rows_kernel(
    out_ptr,
    found_ptr,
    x_scales_ptr,
    scales_ptr,
    bias_ptr,
    width,
    out_stride,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(found_ptr + row * width + column, mask=inside, other=0.0)
    y = y * tl.load(x_scales_ptr + row) * tl.load(scales_ptr + column, mask=inside, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0)
    out = out_ptr + row * out_stride + column
    if ADDS:
        y += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, rounded(y, out_ptr.dtype.element_ty, CHAINED), mask=inside)


def scale_rows(
    out: Tensor,
    found: Tensor,
    x_scales: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Multiply a matmul of codes by its scales, and store or add the result.

    Args:
        out: ``[M, N]``, bfloat16 or float32. Rows may have gaps.
        found: float32 or bfloat16 ``[M, N]``. It may be ``out``.
        x_scales: float32 ``[M, 1]``.
        scales: float32 ``[N, 1]``.
        bias: float32 ``[N]``.
        adds: Add the result to ``out``.
    """
    num_rows, width = found.shape
    assert out.shape == found.shape and out.stride(1) == 1 and found.is_contiguous()
    block = min(_MOST_BLOCK, block_of(width))
    _scale_rows_kernel[(num_rows, cdiv(width, block))](
        out,
        found,
        x_scales,
        scales,
        scales if bias is None else bias,
        width,
        out.stride(0),
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        **chained(out),
    )
