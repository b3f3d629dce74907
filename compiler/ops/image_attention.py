"""Attention with images: between image tiles, and from text tokens to image rows.

Legend: P rows in all tiles, T text tokens, V image rows, H query heads, G key/value heads, D head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, operator


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


@operator(fake=lambda q, k, v, is_padding, scale: torch.empty_like(q), cost=_cost)
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
    scores = _scores(q, k, scale)
    hidden = is_padding.unsqueeze(1) & is_padding
    return _weighted(scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@operator(fake=lambda q, k, v, visible, scale: torch.empty_like(q), cost=_cost)
def cross_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Compute attention from text tokens to image rows: ``q [T, H, D]``, ``k``, ``v [V, G, D]``.

    Tokens without visible rows have zero results.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        visible: First visible row and end per token, ``[T, 2]``.
        scale: Factor for the scores.
    """
    rows = torch.arange(k.shape[0], device=q.device)
    hidden = (rows < visible[:, :1]) | (rows >= visible[:, 1:])
    weights = _scores(q, k, scale).masked_fill(hidden, float("-inf")).softmax(-1)
    return _weighted(weights.nan_to_num(0.0), v)


@operator(
    fake=lambda x, visible: torch.empty_like(x),
    cost=lambda x, visible: Cost(1.0 * x.numel(), x.numel(), x.numel()),
)
def mask_text_rows(x: Tensor, visible: Tensor) -> Tensor:
    """Set rows in ``x [T, C]`` to zero if their ``visible [T, 2]`` range is empty."""
    return x * (visible[:, :1] < visible[:, 1:]).to(x.dtype)
