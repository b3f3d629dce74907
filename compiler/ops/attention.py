"""Causal attention: stateless as models call it, over a cache as executables run it.

Legend: T tokens of a step, N its sequences, H query heads, G key/value heads, D head size,
S cache slots, L positions of a slot. A step's sequences are the slices ``cu_seqlens`` cuts its
tokens into; ``slots [N]`` names the cache slot of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tilewright.compiler.ops.dense import rms_norm, rotate
from tilewright.compiler.ops.library import Cost, operator


def _attend(
    q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, scale: float, window: int, soft_cap: float
) -> Tensor:
    """The last T of L positions attend causally to all (or the last ``window``) of them."""
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
    hidden = key_at > query_at
    if window:
        hidden |= key_at <= query_at - window
    scores_HTL = scores_HTL.masked_fill(hidden, float("-inf"))
    return torch.matmul(scores_HTL.softmax(-1).to(v_HLD.dtype), v_HLD).transpose(0, 1)


def _attention_cost(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Cost:
    num_tokens, num_heads, head_dim = q.shape
    flops = 2.0 * num_tokens * num_tokens * num_heads * head_dim
    return Cost(flops, q.numel() + k.numel() + v.numel(), q.numel())


@operator(
    fake=lambda q, k, v, scale, window=0, soft_cap=0.0: torch.empty_like(q), cost=_attention_cost
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention of one sequence: ``q [T, H, D]``, ``k``, ``v [T, G, D]`` to ``[T, H, D]``.

    ``scale`` multiplies the scores; ``window`` > 0 lets a position see only that many positions,
    itself included; ``soft_cap`` c > 0 makes a score s c tanh(s / c). Softmax in fp32.
    """
    return _attend(q, k, v, scale, window, soft_cap).contiguous()


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
        out[first:last] = _attend(q[first:last], keys, values, scale, window, soft_cap)
    return out


def _step_cost(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, *_: object) -> Cost:
    """An upper bound: every token attends to a full slot."""
    num_tokens, num_heads, head_dim = q.shape
    length = kv_cache.shape[2]
    flops = 4.0 * num_tokens * num_heads * head_dim * length
    return Cost(flops, q.numel() + kv_cache[0].numel(), q.numel() + k.numel() + v.numel())


@operator(
    fake=lambda q, *args, **kwargs: torch.empty_like(q),
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
) -> Tensor:
    """Attention of a step's sequences over their cached positions and their new ones.

    Shapes: ``q [T, H, D]``, ``k`` and ``v [T, G, D]`` (written to the cache), ``kv_cache
    [S, 2, L, G, D]``, ``positions [T]`` (consecutive in a sequence), ``cu_seqlens [N + 1]``,
    ``slots [N]``; returns ``[T, H, D]``.
    """
    where = kv_cache, positions, cu_seqlens, slots
    return _attend_cached(q, k, v, *where, scale, window, soft_cap)


class RopeAttentionArguments(NamedTuple):
    """The arguments of :data:`rope_attention_step` by name; tensors, or nodes of a graph."""

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

    @classmethod
    def of(cls, args: Iterable[Any]) -> Self:
        """The arguments of a call by name, those it leaves out with their defaults:
        ``RopeAttentionArguments.of(node.args)``.
        """
        return cls(*args)

    def given(self) -> tuple[Any, ...]:
        """The positional arguments of a call: all but the last ones that have their defaults,
        and those up to ``interleaved`` in any case.
        """
        args: tuple[Any, ...] = tuple(self)
        defaults = tuple(self._field_defaults.get(name) for name in self._fields)
        least = self._fields.index("interleaved") + 1
        while len(args) > least and args[-1] == defaults[len(args) - 1]:
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
    """The cost of `rope_attention_step`, as of attention; keys and values in ``q`` attend to
    nothing.
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
) -> Tensor:
    """:data:`attention_step` with the rotary embedding of q and k inside, on flat projections.

    ``q [T, H D]`` with ``key`` and ``value [T, G D]``, or ``q`` alone holding the three side by
    side (Q | K | V, ``[T, (H + 2 G) D]``); returns ``[T, H D]``. ``factor`` as in ``rope``. With
    ``q_norm`` and ``k_norm [D]``, both or none, every head of q and k is normed before it turns.
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
    return _attend_cached(q_THD, k_TGD, v_TGD, *where, scale, window, soft_cap).flatten(-2)
