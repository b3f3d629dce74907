"""x * sigmoid(gate), with a gate per channel or per row."""

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

_MAX_BLOCK: int = tuning()["elementwise"]["max_block"]


@triton.jit
def _sigmoid_gate_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    width,
    out_stride,
    x_stride,
    gate_stride,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    if WIDE:
        gate = tl.load(gate_ptr + row * gate_stride + channel, mask=inside, other=0.0)
    else:
        gate = tl.load(gate_ptr + row * gate_stride)
    y = rounded(x * tl.sigmoid(gate), out_ptr.dtype.element_ty, CHAINED)
    tl.store(out_ptr + row * out_stride + channel, y, mask=inside)


def sigmoid_gate(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """Write ``x [T, C]`` times the sigmoid of ``gate [T, C]`` or ``[T, 1]`` to ``out [T, C]``.

    ``out`` and ``x`` are bfloat16 or float32, and may have gaps between rows. ``gate`` and the
    arithmetic are float32.
    """
    num_rows, width = out.shape
    assert x.shape == out.shape and gate.shape in {(num_rows, width), (num_rows, 1)}
    assert out.stride(1) == 1 and x.stride(1) == 1
    assert gate.stride(1) == 1 or gate.shape[1] == 1
    block = min(_MAX_BLOCK, block_of(width))
    _sigmoid_gate_kernel[(num_rows, cdiv(width, block))](
        out,
        x,
        gate,
        width,
        out.stride(0),
        x.stride(0),
        gate.stride(0),
        WIDE=gate.shape[1] == width,
        BLOCK=block,
        **chained(out),
    )
