"""silu(gate) * up, for gates and ups in halves, in alternating groups, or in two tensors."""

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
from tilewright.compiler.targets.cuda.tuning import tuning

_GROUP = 8  # columns of gate, then columns of up, in a paired input
_MAX_BLOCK: int = tuning()["elementwise"]["max_block"]


@triton.jit
def _swiglu_kernel(
    out_ptr,
    gate_ptr,
    up_ptr,
    x_scales,
    gate_scales,
    up_scales,
    width,
    out_stride,
    gate_stride,
    up_stride,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    source = channel
    if PAIRED:
        source = channel // 8 * 16 + channel % 8
    gate = tl.load(gate_ptr + row * gate_stride + source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + source, mask=inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        scale = tl.load(x_scales + row)
        gate *= scale * tl.load(gate_scales + source, mask=inside, other=0.0)
        up *= scale * tl.load(up_scales + source, mask=inside, other=0.0)
    y = rounded(gate * tl.sigmoid(gate) * up, out_ptr.dtype.element_ty, CHAINED)
    tl.store(out_ptr + row * out_stride + channel, y, mask=inside)


def _launch(
    out: Tensor,
    gate: Tensor,
    up: Tensor,
    paired: bool,
    scales: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None),
) -> None:
    num_rows, width = out.shape
    assert out.stride(1) == 1 and gate.stride(1) == 1 and up.stride(1) == 1
    block = min(_MAX_BLOCK, block_of(width))
    _swiglu_kernel[(num_rows, cdiv(width, block))](
        out,
        gate,
        up,
        *scales,
        width,
        out.stride(0),
        gate.stride(0),
        up.stride(0),
        PAIRED=paired,
        BLOCK=block,
        **chained(out),
    )


def swiglu(
    out: Tensor, gate_up: Tensor, *, paired: bool, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Write SwiGLU of ``gate_up [T, 2 F]`` to ``out [T, F]``, with float32 arithmetic.

    Both are bfloat16 or float32, and may have gaps between rows. ``paired``: 8 gate columns
    alternate with their 8 up columns. Else the first half has the gates. ``scales`` multiply
    ``gate_up``: contiguous float32 ``[T, 1]`` and ``[2 F, 1]``.
    """
    num_rows, width = out.shape
    assert gate_up.shape == (num_rows, 2 * width) and not (paired and width % _GROUP)
    first = _GROUP if paired else width  # first up column
    if scales is None:
        _launch(out, gate_up, gate_up[:, first:], paired)
        return
    x_scales, weight_scales = scales
    each = x_scales, weight_scales, weight_scales[first:]
    _launch(out, gate_up, gate_up[:, first:], paired, each)


def swiglu_apart(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """Write :func:`swiglu` for separate tensors ``gate [T, F]`` and ``up [T, F]``."""
    assert out.shape == gate.shape == up.shape
    _launch(out, gate, up, False)
