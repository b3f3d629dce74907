"""Layers with constant-size state: causal convolution and the gated delta rule.

Legend: T tokens, C channels, W convolution width, H value heads, G key heads, K key size, V value
size, S state slots, N sequences in a step. At position 0 a sequence starts with a zero state,
regardless of its slot's contents.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, like, operator

CHUNK = 64
"""Tokens per chunk in the chunked form."""

_EPS = 1e-6


def pieces(cu_seqlens: Tensor, slots: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield the token range and each sequence's state slot in a step."""
    bounds = cu_seqlens.tolist()
    for sequence, slot in enumerate(slots.tolist()):
        yield slice(bounds[sequence], bounds[sequence + 1]), slot


def _before(kept: Tensor, position: Tensor) -> Tensor:
    """Return the state before ``position``: zeros at a sequence's start."""
    return kept if int(position) else torch.zeros_like(kept)


def _convolve(x_TC: Tensor, weight: Tensor, before_CP: Tensor, silu: bool) -> Tensor:
    """Convolve a sequence. ``before_CP`` has the W - 1 values before the first token."""
    padded = torch.cat((before_CP, x_TC.T.to(before_CP.dtype)), dim=1).unsqueeze(0)
    out = torch.nn.functional.conv1d(padded, weight.to(padded.dtype), groups=weight.shape[0])
    y_TC = torch.nn.functional.silu(out[0].T) if silu else out[0].T
    return y_TC.to(x_TC.dtype)


def _conv_cost(x: Tensor, weight: Tensor, *_: object) -> Cost:
    return Cost(2.0 * x.numel() * weight.shape[-1], x.numel() + weight.numel(), x.numel())


@operator(fake=lambda x, weight, silu=True: like(x), cost=_conv_cost)
def causal_conv1d(x: Tensor, weight: Tensor, silu: bool = True) -> Tensor:
    """Convolve each channel of ``x [T, C]`` along the sequence. Return ``[T, C]``.

    ``weight`` is ``[C, 1, W]``. Its last value multiplies the current token. Zeros precede the
    sequence. ``silu`` applies SiLU to the result.
    """
    before = x.new_zeros((x.shape[1], weight.shape[-1] - 1), dtype=torch.float32)
    return _convolve(x, weight, before, silu).contiguous()


@operator(fake=lambda x, weight, window, *_: like(x), cost=_conv_cost, mutates=("window",))
def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    silu: bool = True,
) -> Tensor:
    """Apply :data:`causal_conv1d` to the sequences in a step, ``x [T, C]``.

    ``window [S, C, W - 1]`` contains the last inputs per slot, and is updated.
    """
    out = torch.empty_like(x)
    for tokens, slot in pieces(cu_seqlens, slots):
        before = _before(window[slot], positions[tokens.start])
        out[tokens] = _convolve(x[tokens], weight, before, silu)
        seen = torch.cat((before, x[tokens].T.to(window.dtype)), dim=1)
        window[slot] = seen[:, seen.shape[1] - window.shape[-1] :]
    return out


def _unit(x: Tensor) -> Tensor:
    """Normalize vectors to length 1. The epsilon is part of the model."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def split_heads(
    qkv: Tensor, num_key_heads: int, key_dim: int, num_value_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``qkv [T, 2 G K + H V]`` into queries, keys and values per value head, in fp32.

    Queries and keys ``[T, H, K]`` have length 1. Queries are also divided by the root of K. Values
    are ``[T, H, V]``.
    """
    width, repeat = num_key_heads * key_dim, num_value_heads // num_key_heads
    q, k, v = qkv.float().split((width, width, qkv.shape[-1] - 2 * width), dim=-1)
    q, k = (_unit(each.unflatten(-1, (num_key_heads, key_dim))) for each in (q, k))
    q, k = (each.repeat_interleave(repeat, 1) for each in (q * key_dim**-0.5, k))
    return q, k, v.unflatten(-1, (num_value_heads, -1))


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the state's decay and the correction step, each fp32 ``[T, H]``."""
    decay = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return decay, b.float().sigmoid()


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule token by token (Yang et al., 2024), in fp32.

    Shapes: ``q`` and ``k [T, H, K]``, ``v [T, H, V]``, ``decay`` (logarithm) and ``beta [T, H]``,
    ``state [H, K, V]``. Return ``[T, H, V]`` and the last state.
    """
    out = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = state * decay[t].exp()[:, None, None]
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t].unsqueeze(-1) * (beta[t].unsqueeze(-1) * wrong).unsqueeze(1)
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out, state


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Apply :func:`recurrent_delta_rule` in chunks of tokens with a few matmuls each.

    A triangular system gives a chunk's corrections (the WY form in Yang et al., 2024).
    """
    out = torch.empty_like(v)
    for first in range(0, v.shape[0], chunk):
        part = slice(first, first + chunk)
        out[part], state = _one_chunk(q[part], k[part], v[part], decay[part], beta[part], state)
    return out, state


def _one_chunk(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (each.transpose(0, 1) for each in (q_THK, k_THK, v_THV))
    total = decay.T.cumsum(-1)  # [H, T]: the decay's logarithm from the start of the chunk
    kept = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    weighted = k * beta.T.unsqueeze(-1)
    system = (weighted @ k.mT * kept).tril(-1)
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    since = total.exp().unsqueeze(-1)
    sides = torch.cat((v * beta.T.unsqueeze(-1), weighted * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    corrections = values - keys @ state
    out = (q * since) @ state + (q @ k.mT * kept) @ corrections
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * since[:, -1:] + (k * left).mT @ corrections
    return out.transpose(0, 1), state


def _rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    heads = split_heads(qkv, num_key_heads, key_dim, a.shape[-1])
    rule = recurrent_delta_rule if qkv.shape[0] == 1 else chunked_delta_rule
    return rule(*heads, *gates(a, b, a_log, dt_bias), state)


def _value_dim(qkv: Tensor, a: Tensor, num_key_heads: int, key_dim: int) -> int:
    return int((qkv.shape[-1] - 2 * num_key_heads * key_dim) // a.shape[-1])


def _rule_cost(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    *_: object,
) -> Cost:
    """Return the recurrent form's cost. It reads and writes a single sequence's state
    once.
    """
    num_tokens, num_heads = a.shape
    state = num_heads * key_dim * _value_dim(qkv, a, num_key_heads, key_dim)
    written = num_tokens * num_heads * _value_dim(qkv, a, num_key_heads, key_dim) + state
    return Cost(7.0 * num_tokens * state, qkv.numel() + 2 * a.numel() + state, written)


@operator(
    fake=lambda qkv, a, b, a_log, dt_bias, num_key_heads, key_dim: qkv.new_empty(
        (*a.shape, _value_dim(qkv, a, num_key_heads, key_dim))
    ),
    cost=_rule_cost,
)
def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
) -> Tensor:
    """Apply the gated delta rule to a sequence (Yang et al., 2024). Return ``[T, H, V]``.

    The state is fp32. Value head h reads key head h G / H.

    Args:
        qkv: ``[T, 2 G K + H V]``: queries and keys, normalized to length 1 here, then values.
        a: ``[T, H]``, gives the decay together with ``a_log`` and ``dt_bias``.
        b: ``[T, H]``, logits for the correction step.
        a_log: ``[H]``.
        dt_bias: ``[H]``.
    """
    value_dim = _value_dim(qkv, a, num_key_heads, key_dim)
    state = qkv.new_zeros((a.shape[-1], key_dim, value_dim), dtype=torch.float32)
    out, _ = _rule(qkv, a, b, a_log, dt_bias, num_key_heads, key_dim, state)
    return out.to(qkv.dtype).contiguous()


@operator(
    fake=lambda qkv, a, b, a_log, dt_bias, num_key_heads, key_dim, *_: qkv.new_empty(
        (*a.shape, _value_dim(qkv, a, num_key_heads, key_dim))
    ),
    cost=_rule_cost,
    mutates=("state",),
)
def gated_delta_rule_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    state: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> Tensor:
    """Apply :data:`gated_delta_rule` to the sequences in a step. ``state [S, H, K, V]`` is
    updated.
    """
    out = qkv.new_empty((*a.shape, state.shape[-1]))
    for tokens, slot in pieces(cu_seqlens, slots):
        before = _before(state[slot], positions[tokens.start])
        given = (qkv[tokens], a[tokens], b[tokens], a_log, dt_bias, num_key_heads, key_dim)
        after = _rule(*given, before)
        out[tokens] = after[0].to(out.dtype)
        state[slot] = after[1]
    return out
