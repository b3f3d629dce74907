"""Gated delta rule in prefill, second part: states from chunk to chunk.

Excludes the solution of a chunk's system. See ``prompt_triton.py`` for the shape letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    cdiv,
    has_large_tiles,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaSizes
from tilewright.compiler.targets.cuda.tuning import tuning


@dataclass(frozen=True, slots=True)
class DeltaScratch:
    """Buffers between the kernels of N chunks, float32 and flat.

    Attributes:
        states: States before the chunks, ``[N, H, VALUES, KEYS]``.
        from_state: Factors of the states in the corrections, ``[N, H, C, KEYS]``.
        corrections: Corrected values, ``[N, H, VALUES, C]``.
        keys: Unit keys, ``[N, G, KEYS, C]``.
        totals: Cumulative log decays, ``[N, H, C]``.
        scales: Scales of queries and keys to unit vectors, ``[N, G, 2, C]``.
    """

    states: Tensor
    from_state: Tensor
    corrections: Tensor
    keys: Tensor
    totals: Tensor
    scales: Tensor


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


class _StateBuffers(NamedTuple):
    """Pointers to a chunk's states, state factors, corrections, unit keys and decays."""

    states: Any
    from_state: Any
    corrections: Any
    keys: Any
    totals: Any


@triton.jit
def _after_chunks(buffers, num_chunks, SIZES: tl.constexpr, C: tl.constexpr):
    """Return the pointers after some chunks."""
    return _StateBuffers(
        buffers.states + num_chunks * (SIZES.H * SIZES.VALUES * SIZES.KEYS),
        buffers.from_state + num_chunks * (SIZES.H * C * SIZES.KEYS),
        buffers.corrections + num_chunks * (SIZES.H * SIZES.VALUES * C),
        buffers.keys + num_chunks * (SIZES.G * SIZES.KEYS * C),
        buffers.totals + num_chunks * (SIZES.H * C),
    )


@triton.jit
def _of_head(buffers, h, j, SIZES: tl.constexpr, C: tl.constexpr):
    """Return the pointers to a head's tiles, with the state's columns ``j [1, BLOCK]``."""
    KEYS: tl.constexpr = SIZES.KEYS
    row, key = tl.arange(0, C), tl.arange(0, KEYS)
    return _StateBuffers(
        buffers.states + (h * (SIZES.VALUES * KEYS) + j * KEYS + key[:, None]),
        buffers.from_state + (h * (C * KEYS) + row[:, None] * KEYS + key[None, :]),
        buffers.corrections + (h * (SIZES.VALUES * C) + j * C + row[:, None]),
        buffers.keys + (h // (SIZES.H // SIZES.G) * (KEYS * C) + key[:, None] * C + row[None, :]),
        buffers.totals + h * C,
    )


@triton.jit
def _go_through(
    buffers,
    state_ptr,
    position,
    slot,
    keeps_ptr,
    num_chunks,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    KEEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Update some columns of a head's state over a prompt's chunks from ``position``."""
    H: tl.constexpr = SIZES.H
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    h, row, i = tl.program_id(0), tl.arange(0, C), tl.arange(0, SIZES.KEYS)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    state_at = state_ptr + (slot * H + h) * (K * V) + i * V + j
    inside = (i < K) & (j < V)
    state = tl.load(state_at, mask=inside & (position > 0), other=0.0)
    at = _of_head(buffers, h, j, SIZES, C)
    own = tl.load(at.corrections)
    if KEEPS:
        kept = tl.load(keeps_ptr)
    for chunk in range(num_chunks):
        is_more = chunk + 1 < num_chunks
        if KEEPS:
            if kept >= 0:
                tl.store(state_ptr + (kept * H + h) * (K * V) + i * V + j, state, mask=inside)
            kept = tl.load(keeps_ptr + (chunk + 1) * C, mask=is_more, other=-1)
        next_at = _after_chunks(at, 1, SIZES, C)
        after = tl.load(next_at.corrections, mask=is_more, other=0.0)
        seen, keys = tl.load(at.from_state), tl.load(at.keys)
        total, end = tl.load(at.totals + row), tl.load(at.totals + C - 1)
        before = operand(state, PRECISION, CHAINED)
        corrections = tl.dot(seen, before, acc=own, input_precision=PRECISION)
        tl.store(at.states, before)
        tl.store(at.corrections, operand(corrections, PRECISION, CHAINED))
        corrections = operand(corrections * tl.exp(end - total)[:, None], PRECISION, CHAINED)
        state = tl.dot(keys, corrections, acc=state * tl.exp(end), input_precision=PRECISION)
        own, at = after, next_at
    tl.store(state_at, state, mask=inside & (position >= 0))


@triton.jit
def _chunk_of(start_ptr, first_chunk, num_chunks, C: tl.constexpr):
    """Return the chunk in this span at which a prefill chunk starts, clamped to the span."""
    chunk = tl.load(start_ptr).to(tl.int32) // C - first_chunk
    return tl.minimum(tl.maximum(chunk, 0), num_chunks)


@triton.jit(do_not_specialize=["num_chunks"])  # a single chunk would round differently
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
    SIZES: tl.constexpr,
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
    buffers = _StateBuffers(states_ptr, from_state_ptr, corrections_ptr, keys_ptr, totals_ptr)
    if STARTS:
        starts_ptr += tl.program_id(2)
        begin = _chunk_of(starts_ptr, first_chunk, num_chunks, C)
        num_chunks = _chunk_of(starts_ptr + 1, first_chunk, num_chunks, C) - begin
        if num_chunks == 0:
            return
        buffers = _after_chunks(buffers, begin, SIZES, C)
        positions_ptr += begin * C
        slots_ptr += begin * C
        if KEEPS:
            keeps_ptr += begin * C
    position, slot = tl.load(positions_ptr), tl.load(slots_ptr)
    _go_through(
        buffers,
        state_ptr,
        position,
        slot,
        keeps_ptr,
        num_chunks,
        SIZES,
        BLOCK,
        C,
        KEEPS,
        PRECISION,
        CHAINED,
    )


def delta_states(
    scratch: DeltaScratch,
    *,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    keeps: Tensor | None,
    starts: Tensor | None,
    num_chunks: int,
    first_chunk: int,
    constants: dict[str, Any],
    exact: bool,
) -> None:
    """Compute the states before N chunks, and complete the first part's corrections.

    Args:
        scratch: The first part's outputs, and the states.
        first_chunk: The first chunk's index, for ``starts``.
        constants: Constants of all prefill kernels.

    See :func:`.prompt_triton.delta_rule_prompt` for the remaining arguments.
    """
    sizes: DeltaSizes = constants["SIZES"]
    block = min(_STATE_VALUES, sizes.VALUES)
    num_pieces = 1 if starts is None else len(starts) - 1
    usual = _STATES_LAUNCH if has_large_tiles(state) else _STATES_LAUNCH | {"num_stages": 2}
    _states_kernel[(sizes.H, cdiv(sizes.V, block), num_pieces)](
        scratch.states,
        scratch.from_state,
        scratch.corrections,
        scratch.keys,
        scratch.totals,
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
        **constants,
        **launch_of(usual, block, exact=exact),
    )
