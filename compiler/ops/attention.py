"""Causal attention: stateless as models call it, over a cache as executables run it.

Legend: T tokens of a step, N its sequences, H query heads, G key/value heads, D head size,
S cache slots, L positions of a slot. A step's sequences are the slices ``cu_seqlens`` cuts its
tokens into; ``slots [N]`` names the cache slot of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiler.ops.dense import rotate
from compiler.ops.library import Cost, operator


def _attend(q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float, window: int) -> Tensor:
    """The last T of L positions attend causally to all (or the last ``window``) of them."""
    num_queries, num_heads, _ = q_THD.shape
    length, num_kv_heads, _ = k_LGD.shape
    repeat = num_heads // num_kv_heads
    k_HLD = k_LGD.transpose(0, 1).repeat_interleave(repeat, 0)
    v_HLD = v_LGD.transpose(0, 1).repeat_interleave(repeat, 0)
    scores_HTL = torch.matmul(q_THD.transpose(0, 1), k_HLD.transpose(1, 2)).float() * scale
    query_at = torch.arange(length - num_queries, length, device=q_THD.device).unsqueeze(1)
    key_at = torch.arange(length, device=q_THD.device)
    hidden = key_at > query_at
    if window:
        hidden |= key_at <= query_at - window
    scores_HTL = scores_HTL.masked_fill(hidden, float("-inf"))
    return torch.matmul(scores_HTL.softmax(-1).to(v_HLD.dtype), v_HLD).transpose(0, 1)


def _attention_cost(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Cost:
    num_tokens, num_heads, head_dim = q.shape
    flops = 2.0 * num_tokens * num_tokens * num_heads * head_dim
    return Cost(flops, q.numel() + k.numel() + v.numel(), q.numel())


@operator(fake=lambda q, k, v, scale, window=0: torch.empty_like(q), cost=_attention_cost)
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """Causal attention of one sequence: ``q [T, H, D]``, ``k``, ``v [T, G, D]`` to ``[T, H, D]``.

    ``scale`` multiplies the scores; ``window`` > 0 lets a position see only that many positions,
    itself included. Softmax in fp32.
    """
    return _attend(q, k, v, scale, window).contiguous()


def _attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    out = torch.empty_like(q)
    bounds = cu_seqlens.tolist()
    for sequence, slot in enumerate(slots.tolist()):
        first, last = bounds[sequence], bounds[sequence + 1]
        start = int(positions[first])
        end = start + last - first
        kv_cache[slot, 0, start:end] = k[first:last].to(kv_cache.dtype)
        kv_cache[slot, 1, start:end] = v[first:last].to(kv_cache.dtype)
        keys, values = kv_cache[slot, 0, :end].to(q.dtype), kv_cache[slot, 1, :end].to(q.dtype)
        out[first:last] = _attend(q[first:last], keys, values, scale, window)
    return out


def _step_cost(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *_: object) -> Cost:
    """An upper bound: every token attends to a full slot."""
    num_tokens, num_heads, head_dim = q.shape
    length = kv_cache.shape[2]
    flops = 4.0 * num_tokens * num_heads * head_dim * length
    return Cost(flops, q.numel() + kv_cache[0].numel(), q.numel() + k.numel() + v.numel())


@operator(
    fake=lambda q, k, v, kv_cache, positions, cu_seqlens, slots, scale, window=0: torch.empty_like(
        q
    ),
    cost=_step_cost,
    mutates=("kv_cache",),
)
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of a step's sequences over their cached positions and their new ones.

    Shapes: ``q [T, H, D]``, ``k`` and ``v [T, G, D]`` (written to the cache), ``kv_cache
    [S, 2, L, G, D]``, ``positions [T]`` (consecutive in a sequence), ``cu_seqlens [N + 1]``,
    ``slots [N]``; returns ``[T, H, D]``.
    """
    return _attend_cached(q, k, v, kv_cache, positions, cu_seqlens, slots, scale, window)


def _rope_step_cost(
    q: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor, *_: object
) -> Cost:
    length = kv_cache.shape[2]
    return Cost(4.0 * q.numel() * length, q.numel() + kv_cache[0].numel(), q.numel())


@operator(
    fake=lambda q, key, value, kv_cache, positions, cu_seqlens, slots, inv_freq, num_heads, *_: (
        q.new_empty((q.shape[0], num_heads * kv_cache.shape[-1]))
    ),
    cost=_rope_step_cost,
    mutates=("kv_cache",),
)
def rope_attention_step(
    q: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    num_heads: int,
    scale: float,
    window: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """:data:`attention_step` with the rotary embedding of q and k inside, on flat projections.

    ``q [T, H D]`` with ``key`` and ``value [T, G D]``, or ``q`` alone holding the three side by
    side (Q | K | V, ``[T, (H + 2 G) D]``); returns ``[T, H D]``.
    """
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    if key is None or value is None:
        q, key, value = q.split(
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim), dim=-1
        )
    q_THD = rotate(q.unflatten(-1, (-1, head_dim)), positions, inv_freq, interleaved)
    k_TGD = rotate(key.unflatten(-1, (-1, head_dim)), positions, inv_freq, interleaved)
    v_TGD = value.unflatten(-1, (-1, head_dim))
    out = _attend_cached(q_THD, k_TGD, v_TGD, kv_cache, positions, cu_seqlens, slots, scale, window)
    return out.flatten(-2)
