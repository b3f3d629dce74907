"""Greedy token selection for all rows in two kernels. CUDA graphs can capture them."""

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

_CHUNK: int = tuning()["sampling"]["argmax_chunk"]  # logits for a program
_LAST = tl.constexpr(0xFFFFFFFF)
_NOTHING = tl.constexpr(-(2**63))
_NAN = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(-0x7F800001)  # minus infinity


@triton.jit
def _partial_kernel(
    keys_ptr,
    logits_ptr,
    vocabulary,
    keys_stride,
    logits_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Store a chunk's maximum key. Keys order by logit, then by token: the lowest token
    wins.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=0.0)
    # Map floats to integers in the same order. Both zeros are equal, and NaN is above all numbers.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(logits == logits, order, _NAN).to(tl.int64)
    keys = tl.where(inside, (order << 32) | (_LAST - token.to(tl.int64)), _NOTHING)
    tl.store(keys_ptr + row * keys_stride + chunk, tl.max(keys))


@triton.jit
def _final_kernel(
    tokens_ptr,
    why_ptr,
    keys_ptr,
    ends_ptr,
    positions_ptr,
    num_keys,
    num_ends,
    keys_stride,
    ends_stride,
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    chunk, end = tl.arange(0, BLOCK), tl.arange(0, ENDS)
    keys = tl.load(keys_ptr + row * keys_stride + chunk, mask=chunk < num_keys, other=_NOTHING)
    best = tl.max(keys)
    token = _LAST - (best & _LAST)
    is_number = (best >> 32 > _LEAST) & (best >> 32 < _INFINITY)
    ends = tl.load(ends_ptr + row * ends_stride + end, mask=end < num_ends, other=-1)
    tl.store(tokens_ptr + row, token)
    why = tl.where(is_number, tl.max((ends == token).to(tl.int32)), 2)
    tl.store(why_ptr + row, why.to(tl.uint8))
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row)
        tl.store(positions_ptr + row, tl.where(position < 0, position, position + 1))


def num_keys(vocabulary: int) -> int:
    """Return the scratch column count for :func:`choose` with ``vocabulary`` logits."""
    return cdiv(vocabulary, _CHUNK)


def best_keys(scratch: Tensor, logits: Tensor) -> Tensor:
    """Return the maximum key of every chunk of ``logits [B, V]`` (float32).

    Keys are int64 ``[B, num_keys(V)]`` in ``scratch``. They order by logit, then by token. The
    lower 32 bits are 2^32 - 1 minus the token.
    """
    num_rows, vocabulary = logits.shape
    count = num_keys(vocabulary)
    assert scratch.shape[0] >= num_rows and scratch.shape[1] >= count
    assert logits.stride(1) == scratch.stride(1) == 1
    if count:
        _partial_kernel[(num_rows, count)](
            scratch,
            logits,
            vocabulary,
            scratch.stride(0),
            logits.stride(0),
            BLOCK=_CHUNK,
            num_warps=8,
            **chained(logits),
        )
    return scratch[:num_rows, :count]


def choose(
    tokens_out: Tensor,
    why: Tensor,
    logits: Tensor,
    *,
    end_tokens: Tensor,
    scratch: Tensor,
    positions: Tensor | None = None,
) -> None:
    """Select every row's largest logit. The first of equal logits wins.

    Args:
        tokens_out: Results, int64 ``[B]``.
        why: uint8 ``[B]``. 1: the token is in ``end_tokens``. 2: its logit is infinite or NaN,
            which counts as the largest.
        logits: float32 ``[B, V]``.
        end_tokens: int64 ``[B, E]``, padded with -1.
        scratch: int64 ``[>= B, >= num_keys(V)]``, overwritten.
        positions: int64 ``[B]``, incremented unless negative. None: no positions.
    """
    num_rows = len(logits)
    assert tokens_out.shape == why.shape == (num_rows,) and end_tokens.shape[0] == num_rows
    assert end_tokens.stride(1) == 1 and tokens_out.is_contiguous() and why.is_contiguous()
    count = best_keys(scratch, logits).shape[1]
    num_ends = end_tokens.shape[1]
    _final_kernel[(num_rows,)](
        tokens_out,
        why,
        scratch,
        end_tokens,
        positions,
        count,
        num_ends,
        scratch.stride(0),
        end_tokens.stride(0),
        BLOCK=block_of(count),
        ENDS=block_of(num_ends),
        **chained(logits),
    )
