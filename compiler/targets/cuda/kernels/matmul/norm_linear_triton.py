"""RMSNorm with a small bfloat16 matmul in a single Triton launch.

All programs repeat a token's norm. Weights are loaded before the wait for inputs.
"""

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
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAX_TOKENS = 8
"""Maximum number of tokens. Programs for a token read the weight again."""

_ROWS = 2
_MAX_ROWS, _MAX_COLUMNS = 512, 4096


@triton.jit
def _norm_linear_kernel(
    out_ptr,
    normed_ptr,
    x_ptr,
    norm_ptr,
    data_ptr,
    num_rows,
    width,
    out_stride,
    normed_stride,
    x_stride,
    data_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    feature, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside, token = channel < width, tl.program_id(1).to(tl.int64)
    source = data_ptr + feature[:, None] * data_stride + channel[None, :]
    mask = (feature < num_rows)[:, None] & inside[None, :]
    weights = tl.load(source, mask=mask, other=0.0)
    norm = tl.load(norm_ptr + channel, mask=inside, other=0.0)
    wait_for_inputs(CHAINED)
    x = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0)
    factor = tl.rsqrt(tl.sum(x * x) / width + eps)
    y = rounded(x * factor * norm, normed_ptr.dtype.element_ty, CHAINED)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * normed_stride + channel, y, mask=inside)
    sums = tl.sum(weights.to(tl.float32) * y.to(tl.float32)[None, :], 1)
    tl.store(out_ptr + token * out_stride + feature, sums, mask=feature < num_rows)


def takes(packed: PackedWeight) -> bool:
    """Return whether a single launch is faster than two: the weight is small."""
    is_plain = packed.format == "bf16" and packed.num_experts == 1 and not packed.is_paired
    return is_plain and packed.num_rows <= _MAX_ROWS and packed.num_columns <= _MAX_COLUMNS


def norm_linear(
    out: Tensor, normed: Tensor, x: Tensor, packed: PackedWeight, norm: Tensor, *, eps: float
) -> None:
    """Write the RMSNorm of ``x`` to ``normed``, and its product with a weight to ``out``.

    Args:
        out: float32 ``[T, N]``.
        normed: bfloat16 ``[T, >= K]``. Columns from K remain unchanged.
        x: float32 ``[T, K]``.
        norm: float32 ``[K]``.
    """
    num_rows, num_columns = packed.num_rows, packed.num_columns
    assert takes(packed) and x.shape[1] == num_columns == len(norm) and normed.stride(1) == 1
    assert out.shape == (len(x), num_rows) and out.stride(1) == 1 == x.stride(1)
    _norm_linear_kernel[(cdiv(num_rows, _ROWS), len(x))](
        out,
        normed,
        x,
        norm,
        packed.data,
        num_rows,
        num_columns,
        out.stride(0),
        normed.stride(0),
        x.stride(0),
        packed.data.stride(0),
        eps,
        ROWS=_ROWS,
        BLOCK=block_of(num_columns),
        num_warps=4,
        **chained(out),
    )
