"""Gated sums of cross-attention layers. Tokens without visible images keep their bits."""

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
from tilewright.compiler.targets.cuda.tuning import tuning

_MAX_BLOCK: int = tuning()["elementwise"]["max_block"]


@triton.jit
def _add_gated_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    visible,
    width,
    out_stride,
    x_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    if tl.load(visible + 2 * token) < tl.load(visible + 2 * token + 1):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        gate = 2.0 * tl.sigmoid(2.0 * tl.load(gate_ptr)) - 1.0  # tanh
        x = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0)
        here = out_ptr + token * out_stride + channel
        tl.store(here, tl.load(here, mask=inside, other=0.0) + gate * x, mask=inside)


def add_gated(out: Tensor, x: Tensor, gate: Tensor, visible: Tensor) -> None:
    """Add ``tanh(gate) * x`` to ``out [R, C]`` of tokens with visible images. All float32.

    Args:
        x: ``[R, C]`` with any stride.
        gate: ``[1]``.
        visible: First visible tile and end per token, int64 ``[R, 2]``.
    """
    num_tokens, width = out.shape
    assert x.shape == out.shape and visible.shape == (num_tokens, 2) and visible.is_contiguous()
    assert out.stride(1) == 1 and x.stride(1) == 1
    block = min(_MAX_BLOCK, block_of(width))
    _add_gated_kernel[(num_tokens, cdiv(width, block))](
        out, x, gate, visible, width, out.stride(0), x.stride(0), BLOCK=block, **chained(out)
    )
