"""Random sampling as defined by `sampling.rng.draw`, without a sort.

Greedy selection runs first. Greedy rows, and rows without a valid logit, keep their tokens. After
the cutoff searches (``cutoff.py``), a last pass samples in token order.
"""

from __future__ import annotations

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
from tilewright.compiler.targets.cuda.kernels.sampling.cutoff import (
    BY_COUNTS,
    BY_SUMS,
    HEAT,
    HIGH,
    LEAST,
    LOW,
    PEAK,
    RANDOM,
    REST,
    SHARE,
    TOP_K,
    SearchScratch,
    search,
    weigh,
    weight_of,
)

_NOT_A_NUMBER = tl.constexpr(2)


@triton.jit
def _begin_kernel(
    keys_ptr,
    numbers_ptr,
    logits_ptr,
    tokens_ptr,
    why_ptr,
    words_ptr,
    positions_ptr,
    logits_stride,
    words_stride,
    CHAINED: tl.constexpr,
):
    """Initialize each row's search. ``words`` has the layout of ``slot_table.py``."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    words = words_ptr + row * words_stride
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    heat = tl.load(words).to(tl.float64, bitcast=True)
    is_drawn = (heat > 0.0) & (tl.load(why_ptr + row) != _NOT_A_NUMBER)
    peak = tl.load(logits_ptr + row * logits_stride + tl.load(tokens_ptr + row))
    seed, position = tl.load(words + 3), tl.load(positions_ptr + row)
    zero = (position * 0).to(tl.uint32)
    first, second = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    drawn, _, _, _ = tl.philox(seed, first, second, zero, zero)
    tl.store(numbers + HEAT, tl.where(is_drawn, heat, 0.0))
    tl.store(numbers + PEAK, peak.to(tl.float64))
    tl.store(numbers + RANDOM, drawn.to(tl.uint32).to(tl.float64) * 2.3283064365386963e-10)
    tl.store(numbers + SHARE, tl.load(words + 1).to(tl.float64, bitcast=True))
    tl.store(numbers + TOP_K, tl.load(words + 2).to(tl.float64))
    tl.store(numbers + LEAST, tl.load(words + 4).to(tl.float64, bitcast=True))
    tl.store(keys + LOW, 0x7F800000)
    tl.store(keys + HIGH, 0x7F800000)
    tl.store(keys + REST, 0)


@triton.jit
def _sum_kernel(
    keys_ptr,
    numbers_ptr,
    weights_ptr,
    ties_ptr,
    logits_ptr,
    vocabulary,
    num_chunks,
    logits_stride,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Store the weight of a chunk's tokens above the cutoff key, and count the tokens at it."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    heat = tl.load(numbers + HEAT)
    if heat == 0.0:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    peak, least = tl.load(numbers + PEAK).to(tl.float32), tl.load(numbers + LEAST)
    row_ptr = logits_ptr + row * logits_stride
    key, weights = weigh(row_ptr, at, at < vocabulary, peak, heat.to(tl.float32), least, EXACT=True)
    low, high = tl.load(keys + LOW), tl.load(keys + HIGH)
    place = row * num_chunks + chunk
    tl.store(weights_ptr + place, tl.sum(tl.where(key < low, weights, 0.0)))
    tl.store(ties_ptr + place, tl.sum(((key >= low) & (key < high)).to(tl.int32)))


@triton.jit
def _draw_kernel(
    tokens_ptr,
    why_ptr,
    keys_ptr,
    numbers_ptr,
    weights_ptr,
    ties_ptr,
    logits_ptr,
    ends_ptr,
    vocabulary,
    num_chunks,
    logits_stride,
    num_ends,
    ends_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Select the token at which the cumulative weight exceeds the row's random share."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    heat = tl.load(numbers + HEAT)
    if heat == 0.0:
        return
    low, high, rest = tl.load(keys + LOW), tl.load(keys + HIGH), tl.load(keys + REST)
    one, chunks = tl.where(rest > 0, weight_of(low), 0.0), tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    weights = tl.load(weights_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    ties = tl.load(ties_ptr + row * num_chunks + chunks, mask=is_chunk, other=0)
    ties_before = tl.cumsum(ties, 0) - ties
    kept = tl.minimum(tl.maximum(rest - ties_before, 0), ties)
    weights += kept.to(tl.float64) * one
    upto = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, chunks, 0))
    goal = tl.load(numbers + RANDOM) * tl.sum(tl.where(chunks == last, upto, 0.0))
    found = tl.min(tl.where((upto > goal) & (weights > 0.0), chunks, last))
    before = tl.sum(tl.where(chunks == found, upto - weights, 0.0))
    left = rest - tl.sum(tl.where(chunks == found, ties_before, 0))
    within = tl.arange(0, CHUNK)
    at = found * CHUNK + within
    peak, least = tl.load(numbers + PEAK).to(tl.float32), tl.load(numbers + LEAST)
    row_ptr = logits_ptr + row * logits_stride
    key, each = weigh(row_ptr, at, at < vocabulary, peak, heat.to(tl.float32), least, EXACT=True)
    is_tie = (key >= low) & (key < high)
    is_kept = (key < low) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= left))
    each = tl.where(is_kept, each, 0.0)
    is_kept = each > 0.0
    passes = is_kept & (before + tl.cumsum(each, 0) > goal)
    token = tl.min(tl.where(passes, within, CHUNK))
    token = tl.where(token < CHUNK, token, tl.max(tl.where(is_kept, within, 0)))
    token, end = (found * CHUNK + token).to(tl.int64), tl.arange(0, ENDS)
    tl.store(tokens_ptr + row, token)
    ends = tl.load(ends_ptr + row * ends_stride + end, mask=end < num_ends, other=-1)
    tl.store(why_ptr + row, tl.max((ends == token).to(tl.int32)).to(tl.uint8))


def draw(
    tokens: Tensor,
    why: Tensor,
    logits: Tensor,
    words: Tensor,
    positions: Tensor,
    *,
    end_tokens: Tensor,
    scratch: SearchScratch,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> None:
    """Replace greedy tokens by sampled tokens in rows with a temperature.

    Args:
        tokens, why: Greedy results of :func:`.argmax.choose`, overwritten.
        logits: float32 ``[B, V]``.
        words: Temperature, top-p, top-k, seed and min-p as in ``slot_table.py``, int64 ``[B, >=
            5]``.
        positions: The tokens' positions, int64 ``[B]``.
        has_top_k, has_top_p: Some row uses the filter. False: its search is omitted.
    """
    num_rows, vocabulary = logits.shape
    count, keys, numbers = cdiv(vocabulary, scratch.chunk), scratch.keys, scratch.numbers
    assert logits.dtype == torch.float32 and logits.stride(1) == words.stride(1) == 1
    assert scratch.weights.shape[0] >= num_rows and scratch.weights.shape[1] == count
    assert tokens.is_contiguous() and why.is_contiguous() and positions.is_contiguous()
    strides = logits.stride(0), words.stride(0)
    _begin_kernel[(num_rows,)](
        keys, numbers, logits, tokens, why, words, positions, *strides, **chained(logits)
    )
    for how in [BY_COUNTS] * has_top_k + [BY_SUMS] * has_top_p:
        search(logits, scratch, how)
    _draw_by_weight(tokens, why, logits, end_tokens, scratch)


def _draw_by_weight(
    tokens: Tensor, why: Tensor, logits: Tensor, end_tokens: Tensor, scratch: SearchScratch
) -> None:
    """Sample from the tokens up to the cutoffs: sum the weights by chunk, then find the token."""
    num_rows, vocabulary = logits.shape
    count, options = scratch.weights.shape[1], chained(logits)
    state = scratch.keys, scratch.numbers, scratch.weights, scratch.ties
    sizes = vocabulary, count, logits.stride(0)
    _sum_kernel[(num_rows, count)](
        *state, logits, *sizes, CHUNK=scratch.chunk, num_warps=4, **options
    )
    num_ends = end_tokens.shape[1]
    _draw_kernel[(num_rows,)](
        tokens,
        why,
        *state,
        logits,
        end_tokens,
        *sizes,
        num_ends,
        end_tokens.stride(0),
        CHUNK=scratch.chunk,
        CHUNKS=block_of(count, minimum=2),
        ENDS=block_of(num_ends),
        num_warps=8,
        **options,
    )
