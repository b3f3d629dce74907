"""Linear attention for consecutive tokens of each slot: convolution and delta rule, in Triton.

A slot's tokens are its previous step's accepted drafts, then its rows. Shape letters: B
rows, S slots, N drafts, C channels, W width, H value heads, G key heads, K key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    FUSES,
    DeltaInputs,
    decay_of,
    gated_norm,
    state_at,
    update_state,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.state.token_batch import SlotRows
from tilewright.compiler.targets.cuda.tuning import tuning

_STEP_CHANNELS: int = tuning()["convolution"]["step_channels"]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """A layer's inputs for the last verified drafts, by slot. float32.

    Attributes:
        x: The convolution's inputs, ``[S, N, C]``.
        gates: The gates' inputs, a and b, ``[S, N, 2, H]``.
    """

    x: Tensor
    gates: Tensor


class _Inputs(NamedTuple):
    """A slot's convolution inputs in a kernel: its window, accepted drafts and rows."""

    window: Any
    draft: Any
    x_ptr: Any
    accepted: Any
    has_state: Any
    num_channels: Any
    x_stride: Any


@triton.jit
def _load_inputs(inputs, source, channel, mask, W: tl.constexpr):
    """Load the inputs of token ``source``: from the window, the accepted drafts or the rows."""
    accepted = inputs.accepted
    is_old, is_own = source < 0, source >= accepted
    is_draft = (source >= 0) & (source < accepted)
    at = inputs.window + channel * (W - 1) + source + (W - 1)
    x = tl.load(at, mask=mask & is_old & inputs.has_state, other=0.0)
    at = inputs.draft + source * inputs.num_channels + channel
    x += tl.load(at, mask=mask & is_draft, other=0.0)
    at = inputs.x_ptr + (source - accepted) * inputs.x_stride + channel
    return x + tl.load(at, mask=mask & is_own, other=0.0)


@triton.jit
def _store_window(inputs, count, channel, inside, W: tl.constexpr, TAPS: tl.constexpr):
    """Store the window after the first row. Without rows, it is that after the drafts."""
    tap = tl.arange(0, TAPS)[None, :]
    last = inputs.accepted - (count == 0).to(tl.int64)  # the token with the stored window
    mask = inside[:, None] & (tap < W - 1) & (inputs.accepted + count > 0)
    moved = _load_inputs(inputs, last + tap - (W - 2), channel[:, None], mask, W)
    tl.debug_barrier()  # all threads have read the window and the drafts
    tl.store(inputs.window + channel[:, None] * (W - 1) + tap, moved, mask=mask)


@triton.jit
def _store_drafts(inputs, count, channel, inside):
    """Store the inputs of all rows but the first as the next step's drafts."""
    for own in range(1, count):
        x = tl.load(inputs.x_ptr + own * inputs.x_stride + channel, mask=inside, other=0.0)
        tl.store(inputs.draft + (own - 1) * inputs.num_channels + channel, x, mask=inside)


@triton.jit
def _convolve_kernel(
    out_ptr,
    replayed_ptr,
    x_ptr,
    weight_ptr,
    window_ptr,
    draft_ptr,
    positions_ptr,
    slots_ptr,
    counts_ptr,
    accepted_ptr,
    num_channels,
    out_stride,
    x_stride,
    N: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    first = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, TAPS)[None, :]
    inside = channel < num_channels
    position, slot = tl.load(positions_ptr + first), tl.load(slots_ptr + first)
    count, accepted = tl.load(counts_ptr + first), tl.load(accepted_ptr + first)
    out_ptr += first * out_stride
    x_ptr += first * x_stride
    if position < 0:
        tl.store(out_ptr + channel, tl.zeros((BLOCK,), tl.float32), mask=inside & (count > 0))
        return
    inputs = _Inputs(
        window_ptr + slot * num_channels * (W - 1),
        draft_ptr + slot * N * num_channels,
        x_ptr,
        accepted,
        position > accepted,
        num_channels,
        x_stride,
    )
    replayed_ptr += first * N * num_channels
    weights, in_window = weight_ptr + channel * W, inside[:, None] & (tap < W - 1)
    taps = tl.load(weights[:, None] + tap, mask=in_window, other=0.0)
    for token in range(accepted + count):
        old = _load_inputs(inputs, token + tap - (W - 1), channel[:, None], in_window, W)
        x = _load_inputs(inputs, token, channel, inside, W)
        total = tl.sum(old * taps, 1)
        total += x * tl.load(weights + W - 1, mask=inside, other=0.0)
        y = total * tl.sigmoid(total) if SILU else total
        tl.store(replayed_ptr + token * num_channels + channel, y, mask=inside & (token < accepted))
        own = token - accepted
        tl.store(out_ptr + own * out_stride + channel, y, mask=inside & (own >= 0))
    _store_window(inputs, count, channel, inside, W, TAPS)
    _store_drafts(inputs, count, channel, inside)


def causal_conv1d_rows(
    out: Tensor,
    replayed: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    window: Tensor,
    draft_x: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: SlotRows,
    silu: bool = True,
) -> None:
    """Run :func:`.causal_conv1d.causal_conv1d_step` for consecutive rows of each slot.

    ``replayed [B, N, C]`` gets the accepted drafts at a slot's first index. A slot's window becomes
    the window after its first token.
    """
    num_rows, num_channels = x.shape
    width, num_drafts = weight.shape[1], draft_x.shape[1]
    assert weight.is_contiguous() and window.is_contiguous() and draft_x.is_contiguous()
    assert replayed.shape == (num_rows, num_drafts, num_channels) and replayed.is_contiguous()
    block = min(_STEP_CHANNELS, block_of(num_channels))
    _convolve_kernel[(num_rows, cdiv(num_channels, block))](
        out,
        replayed,
        x,
        weight,
        window,
        draft_x,
        positions,
        slots,
        rows.counts,
        rows.accepted,
        num_channels,
        out.stride(0),
        x.stride(0),
        N=num_drafts,
        W=width,
        TAPS=block_of(width - 1, minimum=1),
        BLOCK=block,
        SILU=silu,
        enable_fp_fusion=FUSES,
        **chained(out),
    )


@triton.jit
def _either(own, draft, at, mask, is_own):
    """Load from the batch, or from an accepted draft."""
    x = tl.load(own + at, mask=is_own & mask, other=0.0)
    return x + tl.load(draft + at, mask=(is_own == 0) & mask, other=0.0)


@triton.jit
def _load_vectors(own, draft, h, is_own, SIZES: tl.constexpr):
    """Load a token's query and key ``[KEYS]``, and its value ``[VALUES]``."""
    G: tl.constexpr = SIZES.G
    K: tl.constexpr = SIZES.K
    i, j, g = tl.arange(0, SIZES.KEYS), tl.arange(0, SIZES.VALUES), h // (SIZES.H // G)
    q = _either(own, draft, g * K + i, i < K, is_own)
    k = _either(own, draft, (G + g) * K + i, i < K, is_own)
    v = _either(own, draft, 2 * G * K + h * SIZES.V + j, j < SIZES.V, is_own)
    return q, k, v


@triton.jit
def _store_gates(gates_ptr, a, b, mask, H: tl.constexpr):
    """Store a token's gate inputs as those of a draft."""
    tl.store(gates_ptr, a, mask=mask)
    tl.store(gates_ptr + H, b, mask=mask)


@triton.jit
def _rule_kernel(
    out_ptr,
    qkv_ptr,
    replayed_ptr,
    a_ptr,
    b_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    z_ptr,
    norm_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    counts_ptr,
    accepted_ptr,
    out_stride,
    qkv_stride,
    a_stride,
    b_stride,
    z_stride,
    eps,
    N: tl.constexpr,
    SIZES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    first, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions_ptr + first), tl.load(slots_ptr + first)
    count, accepted = tl.load(counts_ptr + first), tl.load(accepted_ptr + first)
    H: tl.constexpr = SIZES.H
    V: tl.constexpr = SIZES.V
    j = tl.arange(0, SIZES.VALUES)
    is_value = j < V
    if position < 0:
        zeros = rounded(tl.zeros_like(j).to(tl.float32), out_ptr.dtype.element_ty, CHAINED)
        tl.store(out_ptr + first * out_stride + h * V + j, zeros, mask=is_value & (count > 0))
        return
    pointers, inside = state_at(state_ptr, slot, h, SIZES)
    state = tl.load(pointers, mask=inside & (position > accepted), other=0.0)
    gates_ptr += slot * N * 2 * H + h
    a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
    weight = tl.load(norm_ptr + j, mask=is_value, other=0.0)
    channels = 2 * SIZES.G * SIZES.K + H * V
    last = accepted - (count == 0).to(tl.int64)  # the token with the stored state
    for token in range(accepted + count):
        is_own, at = token >= accepted, first + token - accepted
        own, draft = qkv_ptr + at * qkv_stride, replayed_ptr + (first * N + token) * channels
        q, k, v = _load_vectors(own, draft, h, is_own, SIZES)
        gates = gates_ptr + token * 2 * H
        a = _either(a_ptr + at * a_stride + h, gates, 0, True, is_own)
        b = _either(b_ptr + at * b_stride + h, gates + H, 0, True, is_own)
        decay = decay_of(a, a_log, dt_bias)
        state, o = update_state(state, q, k, v, decay, tl.sigmoid(b), SIZES.K)
        tl.store(pointers, state, mask=inside & (token == last))
        _store_gates(gates_ptr + (token - last - 1) * 2 * H, a, b, token > last, H)
        z = tl.load(z_ptr + at * z_stride + h * V + j, mask=is_value & is_own, other=0.0)
        y = rounded(gated_norm(o, weight, z, eps, V), out_ptr.dtype.element_ty, CHAINED)
        tl.store(out_ptr + at * out_stride + h * V + j, y, mask=is_value & is_own)


def delta_rule_rows(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    replayed: Tensor,
    gates: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: SlotRows,
) -> None:
    """Run :func:`.step_triton.delta_rule_step` for consecutive rows of each slot.

    A slot's state becomes the state after its first token. A slot without tokens gets the state
    after its accepted drafts, with inputs ``replayed`` and ``gates``. Later tokens replace
    ``gates``.
    """
    inputs.check(state)
    weight, eps = norm
    assert out.shape == z.shape and z.stride(1) == out.stride(1) == 1
    sizes = inputs.sizes
    _rule_kernel[(len(out), inputs.num_heads)](
        out,
        inputs.qkv,
        replayed,
        inputs.a,
        inputs.b,
        gates,
        inputs.a_log,
        inputs.dt_bias,
        z,
        weight,
        state,
        positions,
        slots,
        rows.counts,
        rows.accepted,
        out.stride(0),
        inputs.qkv.stride(0),
        inputs.a.stride(0),
        inputs.b.stride(0),
        z.stride(0),
        eps,
        N=gates.shape[1],
        SIZES=sizes,
        num_warps=min(16, max(1, sizes.KEYS * sizes.VALUES // 2048)),
        enable_fp_fusion=FUSES,
        **chained(out),
    )


def linear_attention_rows(
    out: Tensor,
    inputs: DeltaInputs,
    x: Tensor,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    weight: Tensor,
    window: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: SlotRows,
    drafts: DraftInputs,
) -> None:
    """Convolve ``x`` into ``inputs.qkv`` and run the delta rule; see the functions above."""
    replayed = x.new_empty(len(x), *drafts.x.shape[1:])
    where: dict[str, Any] = {"positions": positions, "slots": slots, "rows": rows}
    causal_conv1d_rows(inputs.qkv, replayed, x, weight, window=window, draft_x=drafts.x, **where)
    delta_rule_rows(
        out, inputs, z, norm, replayed=replayed, gates=drafts.gates, state=state, **where
    )
