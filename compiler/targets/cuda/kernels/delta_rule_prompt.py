"""The gated delta rule over a prompt in chunks of 64 tokens, each a few products of matrices (the
WY form of Yang et al., 2024): float32 state and sums, products in three TF32 ones.

Legend: T tokens, N chunks, C tokens of a chunk, H value heads, G key heads, K size of a key, V size
of a value, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.targets.cuda.kernels.delta_rule import EPS, DeltaInputs, decay_of
from compiler.targets.cuda.kernels.launch import (
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)

CHUNK = 64
"""Tokens of a chunk."""
_PART = 64  # channels of keys that a program's state has in each of its two parts
_VALUES = 32  # columns of the state that a program keeps


@triton.jit
def _unit_kernel(
    qkv_ptr, num_heads, stride,
    G: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Queries and keys of length 1, queries over the root of K, in place."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, KEYS)[None, :]
    inside = (head < num_heads) & (i < K)
    at = qkv_ptr + tl.program_id(0).to(tl.int64) * stride + head * K + i
    x = tl.load(at, mask=inside, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]
    tl.store(at, tl.where(head < G, x * (1.0 / K**0.5), x), mask=inside)


@triton.jit
def _gates(a_ptr, b_ptr, positions_ptr, a_log, dt_bias, token, num_tokens, a_stride, b_stride):
    """Which tokens there are, and their decays (logarithms) and steps, 0 where there is none."""
    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=-1)
    there = position >= 0
    row = token.to(tl.int64)
    a = tl.load(a_ptr + row * a_stride, mask=there, other=0.0)
    b = tl.load(b_ptr + row * b_stride, mask=there, other=0.0)
    decay = tl.where(there, decay_of(a, a_log, dt_bias), 0.0)
    return there, decay, tl.where(there, tl.sigmoid(b), 0.0)


@triton.jit
def _rows(x_ptr, token, there, stride, first: tl.constexpr, K: tl.constexpr, PART: tl.constexpr):
    """``[C, PART]``: channels from ``first`` on of queries or keys, 0 where there is no token."""
    i = first + tl.arange(0, PART)[None, :]
    at = x_ptr + token.to(tl.int64)[:, None] * stride + i
    return tl.load(at, mask=there[:, None] & (i < K), other=0.0)


@triton.jit
def _dot(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _solve_kernel(
    solved_ptr, scores_ptr, qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, positions_ptr,
    num_tokens, qkv_stride, a_stride, b_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, C: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (n, h): the scores of a chunk's queries, and the inverse of its triangular system,
    row after row: a product of powers would cancel where keys are alike.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    chunk, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    place = tl.arange(0, C)
    token = chunk * C + place
    there, decay, beta = _gates(
        a_ptr + h, b_ptr + h, positions_ptr, tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h),
        token, num_tokens, a_stride, b_stride,
    )  # fmt: skip
    alike, scores = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first in tl.static_range(0, K, PART):
        k = _rows(qkv_ptr + (G + g) * K, token, there, qkv_stride, first, K, PART)
        q = _rows(qkv_ptr + g * K, token, there, qkv_stride, first, K, PART)
        alike += _dot(k, tl.trans(k))
        scores += _dot(q, tl.trans(k))
    total = tl.cumsum(decay, 0)
    i, j = place[:, None], place[None, :]
    # What is left at token i of what was written at j.
    kept = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
    at = (chunk.to(tl.int64) * H + h) * (C * C) + i * C + j
    tl.store(scores_ptr + at, tl.where(i >= j, scores * kept, 0.0))
    solved = tl.where(i > j, -beta[:, None] * alike * kept, 0.0)
    for row in range(1, C):
        here = i == row
        ours = tl.sum(tl.where(here, solved, 0.0), 0)
        ours += tl.sum(ours[:, None] * solved, 0)
        solved = tl.where(here, ours[None, :], solved)
    tl.store(solved_ptr + at, solved + (i == j).to(tl.float32))


@triton.jit
def _times_state(x_ptr, token, there, stride, low, high, K: tl.constexpr, PART: tl.constexpr):
    """``[C, VALUES]``: queries or keys times both parts of the state."""
    y = _dot(_rows(x_ptr, token, there, stride, 0, K, PART), low)
    if K > PART:
        y += _dot(_rows(x_ptr, token, there, stride, PART, K, PART), high)
    return y


@triton.jit
def _grown(
    part, k_ptr, token, there, stride, corrections, kept,
    first: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A part of the state after a chunk."""
    k = _rows(k_ptr, token, there, stride, first, K, PART)
    return part * kept + _dot(tl.trans(k), corrections)


@triton.jit
def _chunks_kernel(
    out_ptr, solved_ptr, scores_ptr, qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr,
    state_ptr, positions_ptr, slots_ptr,
    num_tokens, out_stride, qkv_stride, a_stride, b_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PART: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (h, j): some columns of a head's state, over all chunks."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    h, place = tl.program_id(0), tl.arange(0, C)
    i, j = tl.arange(0, PART)[:, None], tl.program_id(1) * VALUES + tl.arange(0, VALUES)[None, :]
    first, slot = tl.load(positions_ptr), tl.load(slots_ptr)
    held = state_ptr + (slot * H + h) * (K * V) + i * V + j
    is_low, is_high = (i < K) & (j < V), (i + PART < K) & (j < V)
    low = tl.load(held, mask=is_low & (first > 0), other=0.0)
    high = tl.load(held + PART * V, mask=is_high & (first > 0), other=0.0)
    a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
    q_ptr = qkv_ptr + h // (H // G) * K
    k_ptr = q_ptr + G * K
    square = h * (C * C) + place[:, None] * C + place[None, :]
    for chunk in range((num_tokens + C - 1) // C):
        token = chunk * C + place
        row = token.to(tl.int64)[:, None]
        there, decay, beta = _gates(
            a_ptr + h, b_ptr + h, positions_ptr, a_log, dt_bias,
            token, num_tokens, a_stride, b_stride,
        )  # fmt: skip
        total, end = tl.cumsum(decay, 0), tl.sum(decay, 0)
        since = tl.exp(total)[:, None]
        seen = _times_state(k_ptr, token, there, qkv_stride, low, high, K, PART)
        o = since * _times_state(q_ptr, token, there, qkv_stride, low, high, K, PART)
        at = qkv_ptr + 2 * G * K + h * V + row * qkv_stride + j
        v = tl.load(at, mask=there[:, None] & (j < V), other=0.0)
        corrections = _dot(tl.load(solved_ptr + square), beta[:, None] * (v - since * seen))
        o += _dot(tl.load(scores_ptr + square), corrections)
        inside = (token < num_tokens)[:, None] & (j < V)
        tl.store(out_ptr + row * out_stride + h * V + j, o, mask=inside)
        corrections *= tl.exp(end - total)[:, None]
        kept = tl.exp(end)
        low = _grown(low, k_ptr, token, there, qkv_stride, corrections, kept, 0, K, PART)
        if K > PART:
            high = _grown(high, k_ptr, token, there, qkv_stride, corrections, kept, PART, K, PART)
        solved_ptr += H * C * C
        scores_ptr += H * C * C
    tl.store(held, low, mask=is_low & (first >= 0))
    tl.store(held + PART * V, high, mask=is_high & (first >= 0))


def scratch_bytes(num_tokens: int, num_heads: int) -> int:
    """Bytes of what a prompt's chunks hand on: two squares a chunk and head."""
    return 2 * 4 * triton.cdiv(num_tokens, CHUNK) * num_heads * CHUNK * CHUNK


def delta_rule_prompt(
    out: Tensor, inputs: DeltaInputs, *, state: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """T tokens of the sequence in ``slots[0]``: ``out [T, H V]`` float32, without a norm. Queries
    and keys in ``inputs`` become vectors of length 1 there, too.

    ``state [S, H, K, V]`` goes on by them; K is at most 128. ``positions [T]`` int64
    are consecutive; where the first is 0 the state starts from zeros, and negative ones, at the end
    only, are padding.
    """
    inputs.check(state)
    num_tokens, heads, key_heads = len(out), inputs.num_heads, inputs.num_key_heads
    assert out.shape[1] == heads * inputs.value_dim and out.stride(1) == 1
    assert inputs.key_dim <= 2 * _PART
    keys = block_of(inputs.key_dim)
    few = max(1, 1024 // keys)
    _unit_kernel[(num_tokens, triton.cdiv(2 * key_heads, few))](
        inputs.qkv, 2 * key_heads, inputs.qkv.stride(0),
        G=key_heads, K=inputs.key_dim, KEYS=keys, HEADS=few, **chained(out),
    )  # fmt: skip
    num_chunks = triton.cdiv(num_tokens, CHUNK)
    squares = torch.empty(
        2, num_chunks * heads * CHUNK * CHUNK, dtype=torch.float32, device=out.device
    )
    given = (inputs.qkv, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias)
    strides = (inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0))
    sizes = {
        **{"H": heads, "G": key_heads, "K": inputs.key_dim},
        **{"PART": min(_PART, keys), "C": CHUNK, "num_warps": 4, **chained(out)},
    }
    _solve_kernel[(num_chunks, heads)](*squares, *given, positions, num_tokens, *strides, **sizes)
    values = min(_VALUES, block_of(inputs.value_dim))
    _chunks_kernel[(heads, triton.cdiv(inputs.value_dim, values))](
        out, *squares, *given, state, positions, slots, num_tokens, out.stride(0), *strides,
        V=inputs.value_dim, VALUES=values, num_stages=1, **sizes,
    )  # fmt: skip
