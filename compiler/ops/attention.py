"""Causal attention: the stateless op for models, and the cached op for executables.

Legend: T tokens in a step, N sequences, H query heads, G key/value heads, D head size, S cache
slots, L positions in a slot. ``cu_seqlens`` splits the tokens into sequences. ``slots [N]``
contains each sequence's cache slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tilewright.compiler.ops.dense import rms_norm, rotate
from tilewright.compiler.ops.library import Cost, like, operator


def _attend(
    q_THD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks_H: Tensor | None = None,
    ends_T: Tensor | None = None,
) -> Tensor:
    """Attend causally from the last T positions to all L positions, or to the last ``window``.

    With ``ends_T``, positions before a query's end are visible. A sink takes its share of each
    softmax and has no value.
    """
    num_queries, num_heads, _ = q_THD.shape
    length, num_kv_heads, _ = k_LGD.shape
    repeat = num_heads // num_kv_heads
    k_HLD = k_LGD.transpose(0, 1).repeat_interleave(repeat, 0)
    v_HLD = v_LGD.transpose(0, 1).repeat_interleave(repeat, 0)
    scores_HTL = torch.matmul(q_THD.transpose(0, 1), k_HLD.transpose(1, 2)).float() * scale
    if soft_cap:
        scores_HTL = (scores_HTL / soft_cap).tanh() * soft_cap
    query_at = torch.arange(length - num_queries, length, device=q_THD.device).unsqueeze(1)
    key_at = torch.arange(length, device=q_THD.device)
    hidden = key_at > query_at if ends_T is None else key_at >= ends_T.unsqueeze(1)
    if window:
        hidden |= key_at <= query_at - window
    scores_HTL = scores_HTL.masked_fill(hidden, float("-inf"))
    if sinks_H is not None:
        sinks_HT1 = sinks_H.float().view(-1, 1, 1).expand(-1, num_queries, 1)
        scores_HTL = torch.cat((scores_HTL, sinks_HT1), dim=-1)
    shares_HTL = scores_HTL.softmax(-1)[..., :length]
    return torch.matmul(shares_HTL.to(v_HLD.dtype), v_HLD).transpose(0, 1)


def _attention_cost(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Cost:
    num_tokens, num_heads, head_dim = q.shape
    flops = 2.0 * num_tokens * num_tokens * num_heads * head_dim
    return Cost(flops, q.numel() + k.numel() + v.numel(), q.numel())


@operator(
    fake=lambda q, k, v, scale, window=0, soft_cap=0.0, sinks=None: like(q),
    cost=_attention_cost,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention for a sequence: ``q [T, H, D]``, ``k``, ``v [T, G, D]`` to ``[T, H,
    D]``.

    Softmax is in fp32.

    Args:
        scale: Factor for the scores.
        window: Visible position count, including the query's own. 0: all.
        soft_cap: c > 0 replaces a score s with c tanh(s / c).
        sinks: ``[H]``, a further score per head. Its value is zero.
    """
    return _attend(q, k, v, scale, window, soft_cap, sinks).contiguous()


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
    soft_cap: float,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
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
        own = None if ends is None else ends[first:last]
        how = scale, window, soft_cap, sinks, own
        out[first:last] = _attend(q[first:last], keys, values, *how)
    return out


def _step_cost(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *_: object) -> Cost:
    """Return an upper bound: every token attends to a full slot."""
    num_tokens, num_heads, head_dim = q.shape
    length = kv_cache.shape[2]
    flops = 4.0 * num_tokens * num_heads * head_dim * length
    return Cost(flops, q.numel() + kv_cache[0].numel(), q.numel() + k.numel() + v.numel())


@operator(
    fake=lambda q, *args, **kwargs: like(q),
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
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Compute attention over cached and new positions. Write the new keys and values to the cache.

    Shapes: ``q [T, H, D]``, ``k`` and ``v [T, G, D]``, ``kv_cache [S, 2, L, G, D]``, ``positions
    [T]`` (consecutive in a sequence), ``cu_seqlens [N + 1]``, ``slots [N]``. Return ``[T, H, D]``.
    ``ends [T]``: Position after the last visible position, in the sequence. None: causal.
    """
    where = kv_cache, positions, cu_seqlens, slots
    return _attend_cached(q, k, v, *where, scale, window, soft_cap, sinks, ends)


class RopeAttentionArguments(NamedTuple):
    """Named arguments for :data:`rope_attention_step`: tensors, or nodes in a graph."""

    q: Any
    key: Any
    value: Any
    kv_cache: Any
    positions: Any
    cu_seqlens: Any
    slots: Any
    inv_freq: Any
    num_heads: int
    scale: float
    window: int = 0
    interleaved: bool = False
    factor: float = 1.0
    soft_cap: float = 0.0
    q_norm: Any = None
    k_norm: Any = None
    norm_eps: float = 0.0
    sinks: Any = None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Self:
        """Name a call's arguments, with defaults: ``RopeAttentionArguments.of(node.args)``."""
        return cls(*args)

    def given(self) -> tuple[Any, ...]:
        """Return the positional arguments without trailing defaults. Arguments up to
        ``interleaved`` remain.
        """
        args: tuple[Any, ...] = tuple(self)
        defaults = tuple(self._field_defaults.get(name) for name in self._fields)
        shortest = self._fields.index("interleaved") + 1
        while len(args) > shortest and args[-1] == defaults[len(args) - 1]:
            args = args[:-1]
        return args


def _rope_step_cost(
    q: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    inv_freq: Tensor,
    num_heads: int,
    *_: object,
) -> Cost:
    """Return the cost of `rope_attention_step`, equal to attention's. Keys and values in ``q`` are
    free.
    """
    attending = q.shape[0] * num_heads * kv_cache.shape[-1]
    flops = 4.0 * attending * kv_cache.shape[2]
    return Cost(flops, q.numel() + kv_cache[0].numel(), attending)


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
    factor: float = 1.0,
    soft_cap: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Apply the rotary embedding to flat q and k projections, then :data:`attention_step`.

    Shapes: ``q [T, H D]`` with ``key`` and ``value [T, G D]``, or a single ``q [T, (H + 2 G) D]``
    with the columns Q | K | V. Return ``[T, H D]``. ``factor`` is as in ``rope``. ``q_norm`` and
    ``k_norm [D]`` (both or none) normalize each head before the rotation. ``sinks`` is as in
    ``attention``.
    """
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    if key is None or value is None:
        q, key, value = q.split(
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim), dim=-1
        )
    q_THD, k_TGD = q.unflatten(-1, (-1, head_dim)), key.unflatten(-1, (-1, head_dim))
    if q_norm is not None and k_norm is not None:
        q_THD = rms_norm.reference(q_THD, q_norm, norm_eps)
        k_TGD = rms_norm.reference(k_TGD, k_norm, norm_eps)
    q_THD = rotate(q_THD, positions, inv_freq, interleaved, factor)
    k_TGD = rotate(k_TGD, positions, inv_freq, interleaved, factor)
    v_TGD = value.unflatten(-1, (-1, head_dim))
    where = kv_cache, positions, cu_seqlens, slots
    attended = _attend_cached(q_THD, k_TGD, v_TGD, *where, scale, window, soft_cap, sinks)
    return attended.flatten(-2)
