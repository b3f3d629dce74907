"""Rotation of queries and keys by position offsets, for prompts with images.

Attention kernels rotate by the index in the cache. Rotations add up, so a rotation by the
difference before them gives the rotary position. An offset of 0 changes no bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import cos_sin


@triton.jit
def _rotate_offsets_kernel(
    qkv,
    offsets,
    inv_freq,
    qkv_stride,
    offset_stride,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program (t, h) rotates head h of token t."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < R
    at = token * offset_stride + (pair if BY_PAIR else tl.zeros_like(pair))
    offset = tl.load(offsets + at, mask=inside, other=0)
    frequency = tl.load(inv_freq + pair, mask=inside, other=0.0)
    cos, sin = cos_sin(offset.to(tl.float32) * frequency)
    heads = qkv + token * qkv_stride + tl.program_id(1) * D
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + R
    x = tl.load(heads + first, mask=inside, other=0.0)
    y = tl.load(heads + second, mask=inside, other=0.0)
    tl.store(heads + first, x * cos - y * sin, mask=inside)
    tl.store(heads + second, y * cos + x * sin, mask=inside)


def rotate_offsets(
    qkv: torch.Tensor,
    offsets: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    num_heads: int,
    head_dim: int,
    interleaved: bool = False,
) -> None:
    """Rotate the first ``num_heads`` heads in ``qkv [T, >= num_heads * D]``, float32.

    The results replace them.

    Args:
        qkv: Queries, keys and values, with any stride.
        offsets: Rotary position minus index, int64 ``[T]``, or ``[T, R]`` by pair.
        inv_freq: fp32 ``[R]``. The first 2 R channels are rotated.
        num_heads: Number of query and key heads.
        head_dim: D.
        interleaved: Pairs are neighbors. False: pairs are (i, i + R).
    """
    count, pairs = len(qkv), inv_freq.shape[0]
    assert qkv.stride(1) == 1 and qkv.dtype == torch.float32 and offsets.is_contiguous()
    assert qkv.shape[1] >= num_heads * head_dim and 2 * pairs <= head_dim
    assert offsets.shape in ((count,), (count, pairs)), tuple(offsets.shape)
    _rotate_offsets_kernel[(count, num_heads)](
        qkv,
        offsets,
        inv_freq,
        qkv.stride(0),
        offsets.stride(0),
        D=head_dim,
        R=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        BY_PAIR=offsets.dim() == 2,
        INTERLEAVED=interleaved,
        num_warps=1,
    )
