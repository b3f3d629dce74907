"""The embedding table's rows, widened to float32."""

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
def _embed_kernel(
    out_ptr,
    tokens_ptr,
    table_ptr,
    width,
    out_stride,
    table_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    token = tl.load(tokens_ptr + row).to(tl.int64)
    values = tl.load(table_ptr + token * table_stride + channel, mask=inside)
    tl.store(out_ptr + row * out_stride + channel, values.to(tl.float32), mask=inside)


def embed(out: Tensor, tokens: Tensor, table: Tensor) -> None:
    """``out [T, hidden]`` float32: rows ``tokens [T]`` of ``table [V, >= hidden]`` bfloat16.

    Tokens are int64 in ``[0, V)``, which nothing checks.
    """
    num_tokens, width = out.shape
    assert tokens.shape == (num_tokens,) and table.shape[1] >= width
    assert out.stride(1) == 1 and table.stride(1) == 1 and tokens.is_contiguous()
    block = min(_MAX_BLOCK, block_of(width))
    _embed_kernel[(num_tokens, cdiv(width, block))](
        out, tokens, table, width, out.stride(0), table.stride(0), BLOCK=block, **chained(out)
    )
