"""Attention with images: between image tiles, and from text tokens to image rows.

Legend: P rows in all tiles, T text tokens, V image rows, H query heads, G key/value heads, D head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.dense import rms_norm
from tilewright.compiler.ops.library import Cost, like, operator
from tilewright.compiler.ops.vision import full_attention


def _scores(q_THD: Tensor, k_VGD: Tensor, scale: float) -> Tensor:
    repeat = q_THD.shape[1] // k_VGD.shape[1]
    k_HVD = k_VGD.transpose(0, 1).repeat_interleave(repeat, 0)
    return torch.matmul(q_THD.transpose(0, 1), k_HVD.transpose(1, 2)).float() * scale


def _weighted(weights_HTV: Tensor, v_VGD: Tensor) -> Tensor:
    repeat = weights_HTV.shape[0] // v_VGD.shape[1]
    v_HVD = v_VGD.transpose(0, 1).repeat_interleave(repeat, 0)
    return torch.matmul(weights_HTV.to(v_HVD.dtype), v_HVD).transpose(0, 1).contiguous()


def _cost(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Cost:
    flops = 4.0 * q.numel() * k.shape[0]
    return Cost(flops, q.numel() + k.numel() + v.numel(), q.numel())


@operator(fake=lambda q, k, v, is_padding, scale: like(q), cost=_cost)
def tile_attention(q: Tensor, k: Tensor, v: Tensor, is_padding: Tensor, scale: float) -> Tensor:
    """Compute attention between all image rows: ``q``, ``k``, ``v [P, H, D]``.

    Padding rows do not see padding rows. Remaining rows see all rows, padding included, as in
    training.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        is_padding: Boolean ``[P]``.
        scale: Factor for the scores.
    """
    # Two calls without a mask need no scores in memory: 2.6 GB per layer with four tiles.
    padding, real = is_padding.nonzero().squeeze(1), (~is_padding).nonzero().squeeze(1)
    result = full_attention.reference(q, k, v, scale)
    if len(padding):
        result[padding] = full_attention.reference(q[padding], k[real], v[real], scale)
    return result


def _cross_cost(
    q: Tensor,
    cache: Tensor,
    visible: Tensor,
    norm: Tensor,
    eps: float,
    num_kv_heads: int,
    *_: object,
) -> Cost:
    read = 2.0 * cache.shape[0] * num_kv_heads * norm.shape[0]
    return Cost(4.0 * q.numel() * cache.shape[0], q.numel() + read, q.numel())


@operator(
    fake=lambda q, cache, visible, norm, eps, num_kv_heads, layer, scale: like(q),
    cost=_cross_cost,
)
def cross_attention(
    q: Tensor,
    cache: Tensor,
    visible: Tensor,
    norm: Tensor,
    eps: float,
    num_kv_heads: int,
    layer: int,
    scale: float,
) -> Tensor:
    """Compute attention from text tokens ``q [T, H * D]`` to image rows, with normalized queries.

    Tokens without visible rows have zero results.

    Args:
        q: Queries.
        cache: Image rows ``[V, layers * 2 * G * D]``: keys, then values, layer after layer.
        visible: First visible row and end per token, ``[T, 2]``.
        norm: The query norm's weight, ``[D]``.
        eps: The query norm's epsilon.
        num_kv_heads: Number of key and value heads, G.
        layer: Index among the cross-attention layers.
        scale: Factor for the scores.
    """
    head_dim = norm.shape[0]
    width = num_kv_heads * head_dim
    q_THD = rms_norm.reference(q.unflatten(-1, (-1, head_dim)), norm, eps)
    columns = cache.narrow(-1, 2 * layer * width, 2 * width)
    k_VGD, v_VGD = columns.unflatten(-1, (2, num_kv_heads, head_dim)).unbind(1)
    rows = torch.arange(cache.shape[0], device=q.device)
    hidden = (rows < visible[:, :1]) | (rows >= visible[:, 1:])
    weights = _scores(q_THD, k_VGD, scale).masked_fill(hidden, float("-inf")).softmax(-1)
    return _weighted(weights.nan_to_num(0.0), v_VGD).flatten(-2)


@operator(
    fake=lambda x, visible: like(x),
    cost=lambda x, visible: Cost(1.0 * x.numel(), x.numel(), x.numel()),
)
def mask_text_rows(x: Tensor, visible: Tensor) -> Tensor:
    """Set rows in ``x [T, C]`` to zero if their ``visible [T, 2]`` range is empty."""
    return x * (visible[:, :1] < visible[:, 1:]).to(x.dtype)
