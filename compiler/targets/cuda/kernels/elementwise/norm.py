"""RMSNorm of rows, or of attention heads. float32 with a single rounding."""

from __future__ import annotations

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

MAX_WIDTH = 16384
"""Maximum number of channels in a row. A program has them in registers."""


@triton.jit
def rounded(x, DTYPE: tl.constexpr, CHAINED: tl.constexpr):
    """Round float32 ``x`` to ``DTYPE``, to nearest even. Triton's interpreter would
    truncate.
    """
    if not CHAINED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    width,
    out_stride,
    x_stride,
    eps,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < width
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0)
    factor = tl.rsqrt(tl.sum(x * x) / width + eps)
    y = rounded(x * factor * weight, out_ptr.dtype.element_ty, CHAINED)
    tl.store(out_ptr + row * out_stride + channel, y, mask=inside)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float) -> None:
    """Write ``x`` divided by its root mean square, times ``weight``, to ``out``.

    Args:
        out: bfloat16 or float32 ``[T, >= K]`` with any row stride. Columns from K remain unchanged.
        x: float32 ``[T, K]`` with any row stride. K is at most ``MAX_WIDTH``.
        weight: float32 ``[K]``.
    """
    num_rows, width = x.shape
    assert width <= MAX_WIDTH and out.shape[0] == num_rows and out.shape[1] >= width
    assert x.stride(1) == 1 and out.stride(1) == 1 and weight.shape == (width,)
    block = block_of(width)
    _rms_norm_kernel[(num_rows,)](
        out,
        x,
        weight,
        width,
        out.stride(0),
        x.stride(0),
        eps,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **chained(x),
    )


@triton.jit
def _rms_norm_heads_kernel(
    out_ptr,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_heads,
    out_stride,
    qkv_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (channel < D)
    weight = tl.load(q_weight_ptr + channel, mask=channel < D, other=0.0)
    k_weight = tl.load(k_weight_ptr + channel, mask=channel < D, other=0.0)
    weight = tl.where(head < H, weight, k_weight)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(qkv_ptr + row * qkv_stride + head * D + channel, mask=inside, other=0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight
    y = tl.where(head < H + G, y, x)
    tl.store(out_ptr + row * out_stride + head * D + channel, y, mask=inside)


def rms_norm_heads(
    out: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    num_heads: int,
    eps: float,
    alone: bool = True,
) -> None:
    """Normalize the q and k heads in ``qkv``, and copy v. ``out`` may be ``qkv``.

    Args:
        out, qkv: float32 ``[T, (H + 2 G) D]`` with any row stride.
        q_weight, k_weight: float32 ``[D]``.
        num_heads: Number of query heads H.
        alone: Use a program for each head, which may change the order of additions.
    """
    num_rows, width = qkv.shape
    (head_dim,) = q_weight.shape
    num_kv_heads = (width // head_dim - num_heads) // 2
    assert qkv.dtype == q_weight.dtype == k_weight.dtype and qkv.stride(1) == 1
    assert out.shape == qkv.shape and out.dtype == qkv.dtype and out.stride(1) == 1
    in_place = out.data_ptr() == qkv.data_ptr()
    assert k_weight.shape == q_weight.shape and width == (num_heads + 2 * num_kv_heads) * head_dim
    heads, block = num_heads + num_kv_heads * (1 if in_place else 2), block_of(head_dim)
    together = 1 if alone else max(1, 1024 // block)
    _rms_norm_heads_kernel[(num_rows, cdiv(heads, together))](
        out,
        qkv,
        q_weight,
        k_weight,
        heads,
        out.stride(0),
        qkv.stride(0),
        eps,
        H=num_heads,
        G=num_kv_heads,
        D=head_dim,
        BLOCK=block,
        HEADS=together,
        num_warps=min(8, together),
        **chained(qkv),
    )
