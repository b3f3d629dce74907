"""Gated delta rule in prefill, second part: states from chunk to chunk.

Excludes the solution of a chunk's system. See ``prompt_triton.py`` for the shape letters.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.tuning import tuning

_STATE_VALUES = 32  # state columns for a program
# Two chunks are in flight before the current chunk: 217 KiB of shared memory.
_TUNING = tuning()["delta_rule"]["states"]
_STATES_LAUNCH: dict[str, int] = _TUNING["usual"]
_EXACT_LAUNCH: dict[str, int] = _TUNING["exact"]  # operands are in registers, in two parts
# Two warpgroups with 16 columns read past the end of an operand in Triton 3.6.
_NARROW = 16
_NARROW_LAUNCH: dict[str, int] = _TUNING["narrow"]


@triton.jit
def operand(x, PRECISION: tl.constexpr, CHAINED: tl.constexpr):
    """Round float32 ``x`` to the nearest TF32.

    The matrix unit would truncate, and errors with equal signs accumulate in the state.
    """
    if CHAINED and PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1
        )
        x = bits.to(tl.float32, bitcast=True)
    return x


def launch_of(usual: dict[str, int], num_columns: int, *, exact: bool) -> dict[str, int]:
    """Return the launch options for a kernel whose products have ``num_columns`` columns."""
    if num_columns <= _NARROW:
        return _NARROW_LAUNCH
    return _EXACT_LAUNCH if exact else usual


@triton.jit
def _go_through(
    states_ptr,
    from_state_ptr,
    corrections_ptr,
    keys_ptr,
    totals_ptr,
    state_ptr,
    position,
    slot,
    keeps_ptr,
    num_chunks,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Update some columns of a head's state over a prompt's chunks from ``position``."""
    h, place, key = tl.program_id(0), tl.arange(0, C), tl.arange(0, KEYS)
    i, j = key[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    state_at = state_ptr + (slot * H + h) * (K * V) + i * V + j
    inside = (i < K) & (j < V)
    state = tl.load(state_at, mask=inside & (position > 0), other=0.0)
    states_ptr += h * (VALUES * KEYS) + j * KEYS + i
    from_state_ptr += h * (C * KEYS) + place[:, None] * KEYS + key[None, :]
    corrections_ptr += h * (VALUES * C) + j * C + place[:, None]
    keys_ptr += h // (H // G) * (KEYS * C) + i * C + place[None, :]
    totals_ptr += h * C
    own = tl.load(corrections_ptr)
    if KEEPS:
        kept = tl.load(keeps_ptr)
    for chunk in range(num_chunks):
        is_more = chunk + 1 < num_chunks
        if KEEPS:
            if kept >= 0:
                tl.store(state_ptr + (kept * H + h) * (K * V) + i * V + j, state, mask=inside)
            kept = tl.load(keeps_ptr + (chunk + 1) * C, mask=is_more, other=-1)
        after = tl.load(corrections_ptr + H * VALUES * C, mask=is_more, other=0.0)
        seen, keys = tl.load(from_state_ptr), tl.load(keys_ptr)
        total, end = tl.load(totals_ptr + place), tl.load(totals_ptr + C - 1)
        before = operand(state, PRECISION, CHAINED)
        corrections = tl.dot(seen, before, acc=own, input_precision=PRECISION)
        tl.store(states_ptr, before)
        tl.store(corrections_ptr, operand(corrections, PRECISION, CHAINED))
        corrections = operand(corrections * tl.exp(end - total)[:, None], PRECISION, CHAINED)
        state = tl.dot(keys, corrections, acc=state * tl.exp(end), input_precision=PRECISION)
        own = after
        states_ptr += H * VALUES * KEYS
        from_state_ptr += H * C * KEYS
        corrections_ptr += H * VALUES * C
        keys_ptr += G * KEYS * C
        totals_ptr += H * C
    tl.store(state_at, state, mask=inside & (position >= 0))


@triton.jit
def _chunk_of(start_ptr, first_chunk, num_chunks, C: tl.constexpr):
    """Return the chunk in this span at which a prefill chunk starts, clamped to the span."""
    chunk = tl.load(start_ptr).to(tl.int32) // C - first_chunk
    return tl.minimum(tl.maximum(chunk, 0), num_chunks)


@triton.jit
def _states_kernel(
    states_ptr,
    from_state_ptr,
    corrections_ptr,
    keys_ptr,
    totals_ptr,
    state_ptr,
    positions_ptr,
    slots_ptr,
    keeps_ptr,
    starts_ptr,
    num_chunks,
    first_chunk,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    KEEPS: tl.constexpr,
    STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (h, j, p) computes some columns of a head's state over a prefill chunk's chunks.

    It stores ``states`` before every chunk and completes ``corrections``. With ``KEEPS``, it stores
    requested snapshots. With ``STARTS``, a prefill chunk has the chunks between its start and the
    next start, as far as they are in this span. Without ``STARTS``, it has all chunks.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    if STARTS:
        starts_ptr += tl.program_id(2)
        begin = _chunk_of(starts_ptr, first_chunk, num_chunks, C)
        num_chunks = _chunk_of(starts_ptr + 1, first_chunk, num_chunks, C) - begin
        if num_chunks == 0:
            return
        states_ptr += begin * (H * VALUES * KEYS)
        from_state_ptr += begin * (H * C * KEYS)
        corrections_ptr += begin * (H * VALUES * C)
        keys_ptr += begin * (G * KEYS * C)
        totals_ptr += begin * (H * C)
        positions_ptr += begin * C
        slots_ptr += begin * C
        if KEEPS:
            keeps_ptr += begin * C
    _go_through(
        states_ptr, from_state_ptr, corrections_ptr, keys_ptr, totals_ptr,
        state_ptr, tl.load(positions_ptr), tl.load(slots_ptr), keeps_ptr, num_chunks,
        H, G, K, V, KEYS, VALUES, BLOCK, C, KEEPS, PRECISION, CHAINED,
    )  # fmt: skip


def delta_states(
    states: Tensor,
    from_state: Tensor,
    corrections: Tensor,
    keys: Tensor,
    totals: Tensor,
    *,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    keeps: Tensor | None,
    starts: Tensor | None,
    num_chunks: int,
    first_chunk: int,
    sizes: dict[str, Any],
    exact: bool,
) -> None:
    """Compute the states before N chunks, and complete the first part's corrections.

    Args:
        states: Outputs ``[N, H, VALUES, KEYS]``.
        first_chunk: The first chunk's index, for ``starts``.

    See :func:`.prompt_triton.delta_rule_prompt` for the remaining arguments.
    """
    block = min(_STATE_VALUES, sizes["VALUES"])
    num_pieces = 1 if starts is None else len(starts) - 1
    _states_kernel[(sizes["H"], triton.cdiv(sizes["V"], block), num_pieces)](
        states,
        from_state,
        corrections,
        keys,
        totals,
        state,
        positions,
        slots,
        keeps,
        starts,
        num_chunks,
        first_chunk,
        BLOCK=block,
        KEEPS=keeps is not None,
        STARTS=starts is not None,
        **sizes,
        **launch_of(_STATES_LAUNCH, block, exact=exact),
    )
