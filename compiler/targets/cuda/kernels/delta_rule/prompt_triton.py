"""Gated delta rule in prefill, with its norm, in chunks of 64 tokens.

A chunk is a few matrix products (the WY form in Yang et al., 2024). State and sums are float32.
Products are TF32, or three TF32 products for exact arithmetic. Shape letters: T tokens, P prefill
chunks, N chunks, C tokens in a chunk, H value heads, G key heads, K key size, V value size, S
slots. KEYS and VALUES are K and V padded to powers of two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
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
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import (
    CHUNK,
    delta_solve,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.states_triton import (
    DeltaScratch,
    delta_states,
    launch_of,
    operand,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    EPS,
    DeltaInputs,
    DeltaSizes,
    decay_of,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.tuning import tuning

_TUNING = tuning()["delta_rule"]
SPAN: int = _TUNING["span"]
"""Maximum tokens in a launch. It limits the scratch memory."""
_MOST_KEYS = 128
_PART = 32  # channels of queries and keys in a block
_SOLVE_LAUNCH: dict[str, int] = _TUNING["solve"]
# Two programs fit a multiprocessor.
_OUTPUTS_LAUNCH: dict[str, int] = _TUNING["outputs"]
_DIAGONAL = 16  # rows in blocks that are inverted column by column


@triton.jit
def _there(positions_ptr, token, num_tokens):
    """Return the present token mask: within the prompt and not padding."""
    return tl.load(positions_ptr + token, mask=token < num_tokens, other=-1) >= 0


@triton.jit
def _gates(a_ptr, b_ptr, token, there, a_log, dt_bias, a_stride, b_stride):
    """Return cumulative log decays and steps of the tokens. Absent tokens have 0."""
    row = token.to(tl.int64)
    a = tl.load(a_ptr + row * a_stride, mask=there, other=0.0)
    b = tl.load(b_ptr + row * b_stride, mask=there, other=0.0)
    decay = tl.where(there, decay_of(a, a_log, dt_bias), 0.0)
    return tl.cumsum(decay, 0), tl.where(there, tl.sigmoid(b), 0.0)


@triton.jit
def _rows(x_ptr, token, there, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load a head's channels ``[C, BLOCK]``, 0 for absent tokens."""
    i = tl.arange(0, BLOCK)[None, :]
    at = x_ptr + token.to(tl.int64)[:, None] * stride + i
    return tl.load(at, mask=there[:, None] & (i < SIZE), other=0.0)


@triton.jit
def _dot(x, y, PRECISION: tl.constexpr, CHAINED: tl.constexpr):
    x, y = operand(x, PRECISION, CHAINED), operand(y, PRECISION, CHAINED)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _inverse(
    below,
    C: tl.constexpr,
    B: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return the inverse ``[C, C]`` of 1 + ``below``, a strictly lower triangular matrix.

    Diagonal blocks are inverted column by column and then joined in pairs. Products of powers would
    cancel for similar keys.
    """
    N: tl.constexpr = C // B
    tl.static_assert(C == B << LEVELS)
    block = tl.arange(0, N)
    own = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(below, (N, B, N, B)), 0.0), 2)
    i, j = tl.arange(0, B)[None, :, None], tl.arange(0, B)[None, None, :]
    x = tl.where(i == j, 1.0, tl.zeros((N, B, B), tl.float32))
    for step in range(B - 1):
        column = tl.sum(tl.where(j == step, blocks, 0.0), 2)
        row = tl.sum(tl.where(i == step, x, 0.0), 1)
        x -= column[:, :, None] * row[:, None, :]
    x = tl.reshape(tl.where(own, x[:, :, None, :], 0.0), (C, C))
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(LEVELS):
        size = B << level
        between = (i // size != j // size) & (i // (2 * size) == j // (2 * size))
        part = tl.where(between, below, 0.0)
        x -= _dot(_dot(x, part, PRECISION, CHAINED), x, PRECISION, CHAINED)
    return x


@triton.jit
def _decay_between(total, is_seen):
    """Return the decay factors from token to token. Pairs that are not ``is_seen`` have 1."""
    return tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0))


@triton.jit
def _unit_keys(
    k_ptr,
    token,
    there,
    stride,
    K: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return unit keys ``[C, KEYS]`` and the scales that were applied."""
    k = _rows(k_ptr, token, there, stride, K, KEYS)
    scale = tl.rsqrt(tl.sum(k * k, 1) + EPS)
    return operand(k * scale[:, None], PRECISION, CHAINED), scale


@triton.jit
def _system(k, beta, total, PRECISION: tl.constexpr):
    """Return the strictly lower triangular matrix ``[C, C]`` of a chunk's system."""
    place = tl.arange(0, total.shape[0])
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    later = place[:, None] > place[None, :]
    kept = _decay_between(total, later)
    return tl.where(later, beta[:, None] * alike * kept, 0.0)


@triton.jit
def _solve_kernel(
    from_state_ptr,
    corrections_ptr,
    keys_ptr,
    totals_ptr,
    scales_ptr,
    qkv_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    positions_ptr,
    num_tokens,
    qkv_stride,
    a_stride,
    b_stride,
    SIZES: tl.constexpr,
    C: tl.constexpr,
    DIAGONAL: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (n, h) solves a chunk's system; see :func:`.delta_solve.delta_solve` for
    outputs.
    """
    release_dependents(CHAINED)
    chunk, h = tl.program_id(0), tl.program_id(1)
    a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
    wait_for_inputs(CHAINED)
    K: tl.constexpr = SIZES.K
    KEYS: tl.constexpr = SIZES.KEYS
    VALUES: tl.constexpr = SIZES.VALUES
    g, place = h // (SIZES.H // SIZES.G), tl.arange(0, C)
    token = chunk * C + place
    there = _there(positions_ptr, token, num_tokens)
    total, beta = _gates(a_ptr + h, b_ptr + h, token, there, a_log, dt_bias, a_stride, b_stride)
    at = chunk.to(tl.int64) * SIZES.H + h
    tl.store(totals_ptr + at * C + place, total)
    shared, is_first = chunk.to(tl.int64) * SIZES.G + g, h % (SIZES.H // SIZES.G) == 0
    if is_first:
        q = _rows(qkv_ptr + g * K, token, there, qkv_stride, K, KEYS)
        q_scale = tl.rsqrt(tl.sum(q * q, 1) + EPS) * (1.0 / K**0.5)
        tl.store(scales_ptr + shared * 2 * C + place, q_scale)
    k_ptr, v_ptr = qkv_ptr + (SIZES.G + g) * K, qkv_ptr + 2 * SIZES.G * K + h * SIZES.V
    k, scale = _unit_keys(k_ptr, token, there, qkv_stride, K, KEYS, PRECISION, CHAINED)
    i, j = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
    if is_first:
        tl.store(keys_ptr + shared * (KEYS * C) + i * C + place[:, None], k)
        tl.store(scales_ptr + (shared * 2 + 1) * C + place, scale)
    below = _system(k, beta, total, PRECISION)
    solved = _inverse(below, C, DIAGONAL, LEVELS, PRECISION, CHAINED) * beta[None, :]
    v = _rows(v_ptr, token, there, qkv_stride, SIZES.V, VALUES)
    own = _dot(solved, v, PRECISION, CHAINED)
    tl.store(corrections_ptr + at * (VALUES * C) + j * C + place[:, None], own)
    # Read the keys again, to free their registers during the inversion.
    k = _rows(k_ptr, token, there, qkv_stride, K, KEYS)
    solved *= -(tl.exp(total) * scale)[None, :]
    seen = operand(_dot(solved, k, PRECISION, CHAINED), PRECISION, CHAINED)
    tl.store(from_state_ptr + at * (C * KEYS) + place[:, None] * KEYS + i, seen)


@triton.jit
def _read_state(
    q_at,
    k_at,
    state_at,
    there,
    SIZES: tl.constexpr,
    PART: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the products of queries with keys, ``[C, C]``, and with the state, ``[C, VALUES]``."""
    VALUES: tl.constexpr = SIZES.VALUES
    i = tl.arange(0, PART)
    scores, o = tl.zeros((C, C), tl.float32), tl.zeros((C, VALUES), tl.float32)
    for part in range(0, SIZES.KEYS, PART):
        q = tl.load(q_at + part, mask=there[:, None] & (part + i < SIZES.K)[None, :], other=0.0)
        k = tl.load(k_at + part, mask=there[None, :] & (part + i < SIZES.K)[:, None], other=0.0)
        scores = tl.dot(q, k, acc=scores, input_precision=PRECISION)
        o = tl.dot(q, tl.load(state_at + part), acc=o, input_precision=PRECISION)
    return scores, o


@triton.jit
def _outputs_kernel(
    out_ptr,
    states_ptr,
    corrections_ptr,
    totals_ptr,
    scales_ptr,
    qkv_ptr,
    z_ptr,
    norm_ptr,
    positions_ptr,
    num_tokens,
    out_stride,
    qkv_stride,
    z_stride,
    eps,
    SIZES: tl.constexpr,
    PART: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (n, h) computes a chunk's outputs, with norm and gate.

    The outputs come from the state before the chunk and from its corrections.
    """
    release_dependents(CHAINED)
    V: tl.constexpr = SIZES.V
    KEYS: tl.constexpr = SIZES.KEYS
    VALUES: tl.constexpr = SIZES.VALUES
    place, value, i = tl.arange(0, C), tl.arange(0, VALUES), tl.arange(0, PART)
    weight = tl.load(norm_ptr + value, mask=value < V, other=0.0)
    wait_for_inputs(CHAINED)
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, token = h // (SIZES.H // SIZES.G), tl.program_id(0) * C + place
    there = _there(positions_ptr, token, num_tokens)
    row = token.to(tl.int64)
    q_at = qkv_ptr + g * SIZES.K + row[:, None] * qkv_stride + i[None, :]
    k_at = qkv_ptr + (SIZES.G + g) * SIZES.K + row[None, :] * qkv_stride + i[:, None]
    own = chunk * SIZES.H + h
    state_at = states_ptr + own * (VALUES * KEYS) + value[None, :] * KEYS + i[:, None]
    scores, o = _read_state(q_at, k_at, state_at, there, SIZES, PART, C, PRECISION)
    at = corrections_ptr + own * (VALUES * C)
    corrections = tl.load(at + value[None, :] * C + place[:, None])
    z_at = z_ptr + row[:, None] * z_stride + h * V + value[None, :]
    inside = there[:, None] & (value < V)[None, :]
    z = tl.load(z_at, mask=inside, other=0.0)
    total = tl.load(totals_ptr + own * C + place)
    scales = scales_ptr + (chunk * SIZES.G + g) * (2 * C) + place
    q_scale, k_scale = tl.load(scales), tl.load(scales + C)
    # Remaining share at token i of a value written at j.
    seen = place[:, None] >= place[None, :]
    kept = _decay_between(total, seen)
    scores = tl.where(seen, scores * kept * k_scale[None, :], 0.0) * q_scale[:, None]
    scores = operand(scores, PRECISION, CHAINED)
    o *= (tl.exp(total) * q_scale)[:, None]
    o = tl.dot(scores, corrections, acc=o, input_precision=PRECISION)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None] * weight[None, :] * (z * tl.sigmoid(z))
    y = rounded(y, out_ptr.dtype.element_ty, CHAINED)
    is_row = (token < num_tokens)[:, None] & (value < V)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + h * V + value[None, :], y, mask=is_row)


def _scratch_sizes(num_chunks: int, sizes: DeltaSizes) -> tuple[int, ...]:
    """Return the number of elements of each buffer in `DeltaScratch`."""
    heads, key_heads = num_chunks * sizes.H, num_chunks * sizes.G
    return (
        heads * sizes.VALUES * sizes.KEYS,
        heads * CHUNK * sizes.KEYS,
        heads * CHUNK * sizes.VALUES,
        key_heads * CHUNK * sizes.KEYS,
        heads * CHUNK,
        key_heads * 2 * CHUNK,
    )


def scratch_bytes(
    num_tokens: int, *, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int
) -> int:
    """Return the scratch memory for a prompt in bytes."""
    num_chunks = cdiv(min(num_tokens, SPAN), CHUNK)
    blocks = block_of(key_dim), block_of(value_dim)
    sizes = DeltaSizes(num_heads, num_key_heads, key_dim, value_dim, *blocks)
    return 4 * sum(_scratch_sizes(num_chunks, sizes))


def delta_rule_prompt(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    keeps: Tensor | None = None,
    starts: Tensor | None = None,
    exact: bool,
    is_native: bool = False,
) -> None:
    """Run the delta rule for T prompt tokens; see :func:`.step_triton.delta_rule_step`.

    All tokens belong to slot ``slots[0]`` and have consecutive positions, with padding at the end.
    Key and value sizes are at most 128.

    Args:
        keeps: int64 ``[T]``. A slot for the state before this token, or -1. Used at the first token
            of each 64-token chunk.
        starts: Ascending starts of P independent prefill chunks and their end, int64 ``[P + 1]``,
            divisible by 64. Chunks may be empty. None: a single prefill chunk.
        exact: Use float32 products. False: TF32 (10 mantissa bits).
        is_native: Use delta_solve.cu for the systems.
    """
    inputs.check(state)
    num_tokens, heads, value_dim = len(out), inputs.num_heads, inputs.value_dim
    assert out.shape == z.shape == (num_tokens, heads * value_dim)
    assert out.stride(1) == z.stride(1) == 1 and max(inputs.key_dim, value_dim) <= _MOST_KEYS
    assert starts is None or num_tokens % CHUNK == 0, f"{num_tokens} tokens"
    num_chunks = cdiv(min(num_tokens, SPAN), CHUNK)
    elements = _scratch_sizes(num_chunks, inputs.sizes)
    buffers = torch.empty(sum(elements), dtype=torch.float32, device=out.device).split(elements)
    scratch = DeltaScratch(*buffers)
    for first in range(0, num_tokens, SPAN):
        part = slice(first, first + SPAN)
        some = replace(inputs, qkv=inputs.qkv[part], a=inputs.a[part], b=inputs.b[part])
        _run_span(
            out[part],
            some,
            z[part],
            norm,
            scratch=scratch,
            state=state,
            positions=positions[part],
            slots=slots[part],
            keeps=None if keeps is None else keeps[part],
            starts=starts,
            first=first,
            exact=exact,
            is_native=is_native,
        )


def _run_span(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    scratch: DeltaScratch,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    keeps: Tensor | None,
    starts: Tensor | None,
    first: int,
    exact: bool,
    is_native: bool,
) -> None:
    """Run the tokens from ``first``: all systems, then the states in sequence, then all outputs."""
    num_chunks = cdiv(len(out), CHUNK)
    constants: dict[str, Any] = {
        **{"SIZES": inputs.sizes, "C": CHUNK, "PRECISION": "tf32x3" if exact else "tf32"},
        **chained(out),
    }
    if is_native:
        solved = scratch.from_state, scratch.corrections, scratch.keys, scratch.totals
        delta_solve(*solved, scratch.scales, inputs=inputs, positions=positions)
    else:
        _solve(scratch, inputs, positions, constants)
    delta_states(
        scratch,
        state=state,
        positions=positions,
        slots=slots,
        keeps=keeps,
        starts=starts,
        num_chunks=num_chunks,
        first_chunk=first // CHUNK,
        constants=constants,
        exact=exact,
    )
    launch = launch_of(_OUTPUTS_LAUNCH, inputs.sizes.VALUES, exact=exact)
    _outputs_kernel[(num_chunks, inputs.num_heads)](
        out,
        scratch.states,
        scratch.corrections,
        scratch.totals,
        scratch.scales,
        inputs.qkv,
        z,
        norm[0],
        positions,
        len(out),
        out.stride(0),
        inputs.qkv.stride(0),
        z.stride(0),
        norm[1],
        PART=min(_PART, inputs.sizes.KEYS),
        **constants,
        **launch,
    )


def _solve(
    scratch: DeltaScratch, inputs: DeltaInputs, positions: Tensor, constants: dict[str, Any]
) -> None:
    """Solve the systems of all chunks; see :func:`.delta_solve.delta_solve`."""
    _solve_kernel[(cdiv(len(inputs.a), CHUNK), inputs.num_heads)](
        scratch.from_state,
        scratch.corrections,
        scratch.keys,
        scratch.totals,
        scratch.scales,
        inputs.qkv,
        inputs.a,
        inputs.b,
        inputs.a_log,
        inputs.dt_bias,
        positions,
        len(inputs.a),
        inputs.qkv.stride(0),
        inputs.a.stride(0),
        inputs.b.stride(0),
        DIAGONAL=_DIAGONAL,
        LEVELS=(CHUNK // _DIAGONAL).bit_length() - 1,
        **constants,
        **_SOLVE_LAUNCH,
    )
