"""Causal convolution along each sequence with SiLU, and its window state, in float32.

Shape letters: B rows in a decode step, T prompt tokens, P chunks, C channels, W width, S slots.
"""

from __future__ import annotations

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
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import CHUNK
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import FUSES
from tilewright.compiler.targets.cuda.tuning import tuning

_TUNING = tuning()["convolution"]
_STEP_CHANNELS: int = _TUNING["step_channels"]
_PROMPT_TOKENS: int = _TUNING["prompt_tokens"]
_PROMPT_CHANNELS: int = _TUNING["prompt_channels"]
_PROMPT_WARPS: int = _TUNING["prompt_warps"]
_COUNTED = tl.constexpr(1024)  # positions loaded at a time


@triton.jit
def _step_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    window_ptr,
    positions_ptr,
    slots_ptr,
    num_channels,
    out_stride,
    x_stride,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    if not EARLY:
        wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, TAPS)[None, :]
    inside = channel < num_channels
    position, slot = tl.load(positions_ptr + row), tl.load(slots_ptr + row)
    window = window_ptr + slot * num_channels * (W - 1) + channel[:, None] * (W - 1) + tap
    in_window = inside[:, None] & (tap < W - 1)
    old = tl.load(window, mask=in_window & (position > 0), other=0.0)
    moved = tl.load(window + 1, mask=in_window & (tap < W - 2) & (position > 0), other=0.0)
    weights = weight_ptr + channel * W
    own_weight = tl.load(weights + W - 1, mask=inside, other=0.0)
    total = tl.sum(old * tl.load(weights[:, None] + tap, mask=in_window, other=0.0), 1)
    if EARLY:
        wait_for_inputs(CHAINED)
    x = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0.0)
    moved = tl.where(tap == W - 2, x[:, None], moved)
    total += x * own_weight
    if SILU:
        total *= tl.sigmoid(total)
    out = tl.where(position >= 0, total, 0.0)
    tl.store(out_ptr + row * out_stride + channel, out, mask=inside)
    tl.debug_barrier()  # the window was read, by whichever threads
    tl.store(window, moved, mask=in_window & (position >= 0))


def causal_conv1d_step(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    window: Tensor,
    positions: Tensor,
    slots: Tensor,
    silu: bool = True,
    is_early: bool = False,
) -> None:
    """Convolve one token for B sequences.

    Args:
        out, x: Rows with any stride.
        window: ``[S, C, W - 1]``. Shifted by one token in the rows' slots.
        positions: int64 ``[B]``. Position 0 starts from a zero window. Negative: the result is zero
            and the window does not change.
        slots: int64 ``[B]``.
        silu: Apply SiLU to the result.
        is_early: Read positions, slots and windows before the wait for the previous kernel. No
            kernel of this chain writes them before.
    """
    num_rows, num_channels = x.shape
    width = weight.shape[1]
    _check(out, x, weight, window)
    block = min(_STEP_CHANNELS, block_of(num_channels))
    _step_kernel[(num_rows, cdiv(num_channels, block))](
        out,
        x,
        weight,
        window,
        positions,
        slots,
        num_channels,
        out.stride(0),
        x.stride(0),
        W=width,
        TAPS=block_of(width - 1, minimum=1),
        BLOCK=block,
        SILU=silu,
        EARLY=is_early,
        enable_fp_fusion=FUSES,
        **chained(out),
    )


class _Rows(NamedTuple):
    """A prefill chunk's inputs in a kernel."""

    ptr: Any
    stride: Any
    num_tokens: Any


class _Channels(NamedTuple):
    """A program's channels ``[BLOCK]``, and their mask."""

    index: Any
    inside: Any


@triton.jit
def _first_tokens(
    out_ptr,
    out_stride,
    weight_ptr,
    x,
    window,
    channels,
    goes_on,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute the tokens that read the window."""
    channel, inside = channels.index, channels.inside
    for token in range(W - 1):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(W):
            source = token + tap - (W - 1)
            at = x.ptr + source * x.stride + channel
            value = tl.load(at, mask=inside & (source >= 0) & (source < x.num_tokens), other=0.0)
            at = window + channel * (W - 1) + source + W - 1
            value += tl.load(at, mask=inside & (source < 0) & goes_on, other=0.0)
            total += value * tl.load(weight_ptr + channel * W + tap, mask=inside, other=0.0)
        out = out_ptr + token * out_stride + channel
        if SILU:
            total *= tl.sigmoid(total)
        tl.store(out, total, mask=inside & (token < x.num_tokens))


@triton.jit
def _move_window(window, x, positions_ptr, channels, goes_on, W: tl.constexpr, TAPS: tl.constexpr):
    """Store the prompt's last inputs, without padding, in the window."""
    channel, count = channels.index[:, None], tl.zeros((), tl.int32)
    for first in range(0, x.num_tokens, _COUNTED):
        at = first + tl.arange(0, _COUNTED)
        position = tl.load(positions_ptr + at, mask=at < x.num_tokens, other=-1)
        count += tl.sum((position >= 0).to(tl.int32), 0)
    kept = tl.arange(0, TAPS)[None, :]
    before = count - (W - 1) + kept
    in_window = channels.inside[:, None] & (kept < W - 1)
    end = x.ptr + before.to(tl.int64) * x.stride + channel
    last = tl.load(end, mask=in_window & (before >= 0), other=0.0)
    target = window + channel * (W - 1) + kept
    last += tl.load(target + count, mask=in_window & (before < 0) & goes_on, other=0.0)
    tl.debug_barrier()  # all threads have read the window
    tl.store(target, last, mask=in_window & (count > 0))


@triton.jit
def _keep_window(window, x, token, channels, W: tl.constexpr, TAPS: tl.constexpr):
    """Store the window before a token as a snapshot."""
    channel, tap = channels.index[:, None], tl.arange(0, TAPS)[None, :]
    in_window = channels.inside[:, None] & (tap < W - 1)
    last = x.ptr + (token - (W - 1) + tap).to(tl.int64) * x.stride + channel
    target = window + channel * (W - 1) + tap
    tl.store(target, tl.load(last, mask=in_window, other=0.0), mask=in_window)


@triton.jit
def _convolve(
    x, weight_ptr, token, channels, W: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the convolution of tokens whose window is in the chunk, ``[TOKENS, BLOCK]``."""
    channel, inside = channels.index, channels.inside
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(W):
        source = token + tap - (W - 1)
        there = ((source >= 0) & (source < x.num_tokens))[:, None] & inside[None, :]
        at = x.ptr + source.to(tl.int64)[:, None] * x.stride + channel[None, :]
        weight = tl.load(weight_ptr + channel * W + tap, mask=inside, other=0.0)
        total += tl.load(at, mask=there, other=0.0) * weight[None, :]
    return total


@triton.jit
def _piece_of(starts_ptr, token, num_pieces, num_tokens, PIECES: tl.constexpr):
    """Return the start and length of the chunk with a token."""
    piece = tl.arange(0, PIECES)
    start = tl.load(starts_ptr + piece, mask=piece < num_pieces, other=num_tokens).to(tl.int32)
    begin = tl.max(tl.where(start <= token, start, 0), 0)
    end = tl.min(tl.where(start > token, start, num_tokens), 0)
    return begin, end - begin


@triton.jit
def _prompt_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    window_ptr,
    positions_ptr,
    slots_ptr,
    keeps_ptr,
    starts_ptr,
    num_tokens,
    num_channels,
    num_pieces,
    out_stride,
    x_stride,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
    PIECES: tl.constexpr,
    SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, c) computes TOKENS tokens, at least W - 1.

    Only the first program of a chunk reads the window, and then writes it. With ``KEEPS``, later
    programs may store a snapshot. ``PIECES`` is a power of two, or 0 for a single chunk.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    first = tl.program_id(0) * TOKENS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    if PIECES:
        begin, num_tokens = _piece_of(starts_ptr, first, num_pieces, num_tokens, PIECES)
        first -= begin
        out_ptr += begin.to(tl.int64) * out_stride
        x_ptr += begin.to(tl.int64) * x_stride
        positions_ptr, slots_ptr = positions_ptr + begin, slots_ptr + begin
        if KEEPS:
            keeps_ptr += begin
    token = first + tl.arange(0, TOKENS)
    x, channels = _Rows(x_ptr, x_stride, num_tokens), _Channels(channel, inside)
    if first == 0:
        goes_on = tl.load(positions_ptr) > 0
        window = window_ptr + tl.load(slots_ptr) * num_channels * (W - 1)
        _first_tokens(out_ptr, out_stride, weight_ptr, x, window, channels, goes_on, W, BLOCK, SILU)
        _move_window(window, x, positions_ptr, channels, goes_on, W, TAPS)
    elif KEEPS:
        kept = tl.load(keeps_ptr + first)
        if kept >= 0:
            window = window_ptr + kept * num_channels * (W - 1)
            _keep_window(window, x, first, channels, W, TAPS)
    total = _convolve(x, weight_ptr, token, channels, W, TOKENS, BLOCK)
    out = out_ptr + token.to(tl.int64)[:, None] * out_stride + channel[None, :]
    is_ours = ((token >= W - 1) & (token < num_tokens))[:, None] & inside[None, :]
    tl.store(out, total * tl.sigmoid(total) if SILU else total, mask=is_ours)


def causal_conv1d_prompt(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    window: Tensor,
    positions: Tensor,
    slots: Tensor,
    keeps: Tensor | None = None,
    starts: Tensor | None = None,
    silu: bool = True,
) -> None:
    """Convolve T prompt tokens; see :func:`causal_conv1d_step`.

    All tokens belong to slot ``slots[0]`` and have consecutive positions, with padding at the end.

    Args:
        keeps: int64 ``[T]``. A slot for the window before this token, or -1. Used after each 64
            tokens.
        starts: Ascending starts of P independent chunks and their end, int64 ``[P + 1]``, divisible
            by 64. Chunks may be empty. None: a single chunk.
    """
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    _check(out, x, weight, window)
    tokens = block_of(width - 1, minimum=_PROMPT_TOKENS)
    is_whole = keeps is None and starts is None
    assert is_whole or CHUNK % tokens == 0, f"a window of {width - 1} values"
    assert starts is None or num_tokens % CHUNK == 0, f"{num_tokens} tokens"
    num_pieces = 0 if starts is None else len(starts) - 1
    block = min(_PROMPT_CHANNELS, block_of(num_channels))
    _prompt_kernel[(cdiv(num_tokens, tokens), cdiv(num_channels, block))](
        out,
        x,
        weight,
        window,
        positions,
        slots,
        keeps,
        starts,
        num_tokens,
        num_channels,
        num_pieces,
        out.stride(0),
        x.stride(0),
        W=width,
        TAPS=block_of(width - 1, minimum=1),
        TOKENS=tokens,
        BLOCK=block,
        KEEPS=keeps is not None,
        PIECES=num_pieces and block_of(num_pieces, minimum=1),
        SILU=silu,
        num_warps=_PROMPT_WARPS,
        **chained(out),
    )


def _check(out: Tensor, x: Tensor, weight: Tensor, window: Tensor) -> None:
    num_channels, width = weight.shape
    assert x.shape == out.shape and x.shape[1] == num_channels and x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous() and window.is_contiguous()
    assert window.shape[1:] == (num_channels, width - 1)
