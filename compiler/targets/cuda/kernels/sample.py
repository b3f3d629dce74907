"""A token of each row, drawn as `choosing.draw` defines it, without a sort: the likeliest have been
chosen before, and rows that are greedy or have no number to choose from stay as they are.

Tokens are ordered by a key, the bits of how far a scaled logit lies below the largest. The key at
which top-k or the nucleus ends is found digit by digit, by counts or sums of 32 ranges of keys.
Every sum is made in one order whatever the batch.

Legend: B rows, V logits, C chunks of a row, N ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.launch import (
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)

CHUNK = 2048
"""Logits that one program looks at."""
_RANGES, _NUM_SEARCHES = 32, 7
"""Launches of a search: the first cuts at halves of 1 and leaves at most 2 ** 30 keys."""
_END = tl.constexpr(0x7F800000)  # a key above all that are there
_NOT_A_NUMBER = tl.constexpr(2)
_LEAST_SCALED = tl.constexpr(-745.1332)  # below it a weight is nothing in float64, too
_TINY = tl.constexpr(-1.862645149230957e-09)  # 2 ** -29: above it several logits have one weight

# Columns of `Scratch.keys` and of `Scratch.numbers`.
_LOW, _HIGH, _REST, _FROM, _UPTO, _RANGE, _BUSY = (tl.constexpr(at) for at in range(7))
_HEAT, _PEAK, _RANDOM, _SHARE, _LEAST, _BEFORE, _GOAL, _TOP_K = (
    tl.constexpr(at) for at in range(8)
)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernels keep of B rows: ``keys [B, 8]`` int32 and ``numbers [B, 8]`` float64, the
    search of each row; ``counts [B, C, N]`` int32 and ``sums [B, C, N]`` float64 of ranges of keys;
    ``arrived [B]`` int32, zero between launches; ``weights [B, C]`` float64, ``ties [B, C]`` int32.
    """

    keys: Tensor
    numbers: Tensor
    counts: Tensor
    sums: Tensor
    arrived: Tensor
    weights: Tensor
    ties: Tensor
    chunk: int

    @classmethod
    def empty(
        cls, num_rows: int, vocabulary: int, device: torch.device, *, chunk: int = CHUNK
    ) -> Self:
        """Room for so many rows; ``chunk``: logits that one program looks at, a power of 2."""
        count = triton.cdiv(vocabulary, chunk)
        return cls(
            torch.empty(num_rows, 8, dtype=torch.int32, device=device),
            torch.empty(num_rows, 8, dtype=torch.float64, device=device),
            torch.empty(num_rows, count, _RANGES, dtype=torch.int32, device=device),
            torch.empty(num_rows, count, _RANGES, dtype=torch.float64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_rows, count, dtype=torch.float64, device=device),
            torch.empty(num_rows, count, dtype=torch.int32, device=device),
            chunk,
        )


@triton.jit
def _weigh(logits_ptr, at, inside, peak, heat, least, EXACT: tl.constexpr):
    """Keys of logits, `_END` where a token is not there, and their weights (0 unless EXACT)."""
    logits = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(logits - peak, heat)
    there = inside & (scaled > _LEAST_SCALED)
    scaled = tl.where(there, scaled, 0.0)
    wide = scaled.to(tl.float64)
    below = tl.where(scaled > _TINY, (1.0 - (1.0 + wide)).to(tl.float32), -scaled)
    below = tl.where(below == 0.0, 0.0, below)  # of one sign
    weights = tl.zeros_like(wide)
    if EXACT:
        weights = tl.where(there, tl.exp(wide), 0.0)
        there &= weights >= least
        weights = tl.where(there, weights, 0.0)
    elif least > 0.0:
        there = there & (tl.exp(wide) >= least)
    return tl.where(there, below.to(tl.int32, bitcast=True), _END), weights


@triton.jit
def _weight_of(key):
    """The weight of all tokens of a key."""
    return tl.exp(-(key.to(tl.float32, bitcast=True).to(tl.float64)))


@triton.jit
def _begin_kernel(
    keys_ptr, numbers_ptr, logits_ptr, tokens_ptr, why_ptr, words_ptr, positions_ptr,
    logits_stride, words_stride, CHAINED: tl.constexpr,
):  # fmt: skip
    """What each row's search starts from; ``words``: see `seats.Parameters`."""
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
    tl.store(numbers + _HEAT, tl.where(is_drawn, heat, 0.0))
    tl.store(numbers + _PEAK, peak.to(tl.float64))
    tl.store(numbers + _RANDOM, drawn.to(tl.uint32).to(tl.float64) * 2.3283064365386963e-10)
    tl.store(numbers + _SHARE, tl.load(words + 1).to(tl.float64, bitcast=True))
    tl.store(numbers + _TOP_K, tl.load(words + 2).to(tl.float64))
    tl.store(numbers + _LEAST, tl.load(words + 4).to(tl.float64, bitcast=True))
    tl.store(keys + _LOW, 0x7F800000)
    tl.store(keys + _HIGH, 0x7F800000)
    tl.store(keys + _REST, 0)


@triton.jit
def _measure(
    row_ptr, numbers, at, inside, start, stop, shift,
    SUMS: tl.constexpr, FIRST: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """How many of some logits have keys in each range, and what they weigh (0 unless SUMS)."""
    peak, heat = tl.load(numbers + _PEAK).to(tl.float32), tl.load(numbers + _HEAT).to(tl.float32)
    least = tl.load(numbers + _LEAST)
    key, weights = _weigh(row_ptr, at, inside, peak, heat, least, EXACT=SUMS)
    if FIRST:
        which = tl.minimum(key.to(tl.float32, bitcast=True) * 2.0, RANGES - 1.0).to(tl.int32)
    else:
        which = (key - start) >> shift
    which = tl.where((key >= start) & (key < stop), which, -1)
    ranges = tl.arange(0, RANGES)
    counts, sums = tl.zeros([RANGES], tl.int32), tl.zeros([RANGES], tl.float64)
    for each in tl.static_range(RANGES):
        is_here = which == each
        counts = tl.where(ranges == each, tl.sum(is_here.to(tl.int32)), counts)
        if SUMS:
            sums = tl.where(ranges == each, tl.sum(tl.where(is_here, weights, 0.0)), sums)
    return counts, sums


@triton.jit
def _search_kernel(
    keys_ptr, numbers_ptr, counts_ptr, sums_ptr, arrived_ptr, logits_ptr,
    vocabulary, num_chunks, logits_stride,
    SUMS: tl.constexpr, FIRST: tl.constexpr, RANGES: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One more digit of the key at which a row's top-k ends, or with SUMS its nucleus.

    The last program of a row narrows the range down for the next launch.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    if FIRST:
        wanted = tl.load(numbers + _SHARE) < 1.0 if SUMS else tl.load(numbers + _TOP_K) > 0.0
        if not (wanted & (tl.load(numbers + _HEAT) > 0.0)):
            tl.store(keys + _BUSY, 0)
            return
        start, stop = 0, tl.load(keys + _LOW)
    else:
        if tl.load(keys + _BUSY) == 0:
            return
        start, stop = tl.load(keys + _FROM), tl.load(keys + _UPTO)
    shift = (stop - start) * 0
    for bit in tl.static_range(5, 31):
        shift += (stop - start > (1 << bit)).to(tl.int32)
    own = (row * num_chunks + chunk) * RANGES
    is_empty = stop < 0
    if not FIRST:  # where none of the range before was, none is now
        is_empty = tl.load(counts_ptr + own + tl.load(keys + _RANGE)) == 0
    counts, sums = tl.zeros([RANGES], tl.int32), tl.zeros([RANGES], tl.float64)
    if not is_empty:
        at, row_ptr = chunk * CHUNK + tl.arange(0, CHUNK), logits_ptr + row * logits_stride
        counts, sums = _measure(
            row_ptr, numbers, at, at < vocabulary, start, stop, shift, SUMS, FIRST, RANGES
        )
    tl.store(counts_ptr + own + tl.arange(0, RANGES), counts)
    if SUMS:
        tl.store(sums_ptr + own + tl.arange(0, RANGES), sums)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row, 0)
        first = row * num_chunks * RANGES
        counts, sizes = _totals(
            counts_ptr + first, sums_ptr + first, num_chunks, SUMS, RANGES, CHUNKS
        )
        _narrow(keys, numbers, counts, sizes, start, stop, shift, SUMS, FIRST, RANGES)


@triton.jit
def _totals(
    counts_ptr, sums_ptr, num_chunks,
    SUMS: tl.constexpr, RANGES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of all chunks of a row: counts of each range, and what is searched by, counts or sums."""
    chunks = tl.arange(0, CHUNKS)
    every = chunks[:, None] * RANGES + tl.arange(0, RANGES)[None, :]
    inside = chunks[:, None] < num_chunks
    counts = tl.sum(tl.load(counts_ptr + every, mask=inside, other=0, cache_modifier=".cg"), 0)
    sizes = counts.to(tl.float64)
    if SUMS:
        sizes = tl.sum(tl.load(sums_ptr + every, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    return counts, sizes


@triton.jit
def _narrow(
    keys, numbers, counts, sizes, start, stop, shift,
    SUMS: tl.constexpr, FIRST: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """Go on with the last range that begins below the goal; a range of one key is the end."""
    ranges = tl.arange(0, RANGES)
    before = 0.0 * tl.sum(sizes)
    if not FIRST:
        before = tl.load(numbers + _BEFORE)
    goal = tl.load(numbers + _TOP_K)
    ends_above = before < 0.0
    if SUMS:
        goal = tl.load(numbers + _GOAL)
        if FIRST:
            rest, below, one = tl.load(keys + _REST), tl.sum(sizes), _weight_of(stop)
            share = tl.load(numbers + _SHARE)
            goal = share * (below + tl.where(rest > 0, rest.to(tl.float64) * one, 0.0))
            ends_above = below < goal  # where top-k does, or earlier among its equals
            if ends_above:
                tl.store(keys + _REST, _count_before(below, one, goal, rest))
    befores = before + tl.cumsum(sizes, 0) - sizes
    found = tl.max(tl.where((befores < goal) & (counts > 0), ranges, -1))
    found = tl.where(found < 0, tl.min(tl.where(counts > 0, ranges, RANGES - 1)), found)
    before = tl.sum(tl.where(ranges == found, befores, 0.0))
    count = tl.sum(tl.where(ranges == found, counts, 0))
    if FIRST:
        half = found.to(tl.float32) * 0.5
        low = half.to(tl.int32, bitcast=True)
        high = tl.where(found == RANGES - 1, stop, (half + 0.5).to(tl.int32, bitcast=True))
    else:
        low, high = start + (found << shift), start + ((found + 1) << shift)
    high = tl.minimum(high, stop)
    is_found = (high - low == 1) & (not ends_above)
    tl.store(numbers + _BEFORE, before)
    tl.store(numbers + _GOAL, goal)
    tl.store(keys + _FROM, low)
    tl.store(keys + _UPTO, high)
    tl.store(keys + _RANGE, found)
    tl.store(keys + _BUSY, tl.where(is_found | ends_above, 0, 1))
    if is_found:
        tl.store(keys + _LOW, low)
        tl.store(keys + _HIGH, high)
        # of equals that top-k cuts off there are as many as it leaves
        one = _weight_of(low) if SUMS else 1.0
        tl.store(keys + _REST, _count_before(before, one, goal, count))


@triton.jit
def _count_before(before, one, goal, most):
    """How many of so many equal weights begin below a goal: one at least."""
    count = tl.minimum(tl.ceil((goal - before) / one), most.to(tl.float64))
    count = tl.where(before + (count - 1.0) * one < goal, count, count - 1.0)
    count = tl.where((before + count * one < goal) & (count < most), count + 1.0, count)
    return tl.maximum(count, 1.0).to(tl.int32)


@triton.jit
def _sum_kernel(
    keys_ptr, numbers_ptr, weights_ptr, ties_ptr, logits_ptr, vocabulary, num_chunks, logits_stride,
    CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """What a chunk's kept tokens weigh, those at the last key apart, which are counted."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    heat = tl.load(numbers + _HEAT)
    if heat == 0.0:
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    peak, least = tl.load(numbers + _PEAK).to(tl.float32), tl.load(numbers + _LEAST)
    row_ptr = logits_ptr + row * logits_stride
    key, weights = _weigh(
        row_ptr, at, at < vocabulary, peak, heat.to(tl.float32), least, EXACT=True
    )
    low, high = tl.load(keys + _LOW), tl.load(keys + _HIGH)
    place = row * num_chunks + chunk
    tl.store(weights_ptr + place, tl.sum(tl.where(key < low, weights, 0.0)))
    tl.store(ties_ptr + place, tl.sum(((key >= low) & (key < high)).to(tl.int32)))


@triton.jit
def _draw_kernel(
    tokens_ptr, why_ptr, keys_ptr, numbers_ptr, weights_ptr, ties_ptr, logits_ptr, ends_ptr,
    vocabulary, num_chunks, logits_stride, num_ends, ends_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ENDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulative weight passes the row's random share of it."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    heat = tl.load(numbers + _HEAT)
    if heat == 0.0:
        return
    low, high, rest = tl.load(keys + _LOW), tl.load(keys + _HIGH), tl.load(keys + _REST)
    one, chunks = tl.where(rest > 0, _weight_of(low), 0.0), tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    weights = tl.load(weights_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    ties = tl.load(ties_ptr + row * num_chunks + chunks, mask=is_chunk, other=0)
    ties_before = tl.cumsum(ties, 0) - ties
    kept = tl.minimum(tl.maximum(rest - ties_before, 0), ties)
    weights += kept.to(tl.float64) * one
    upto = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, chunks, 0))
    goal = tl.load(numbers + _RANDOM) * tl.sum(tl.where(chunks == last, upto, 0.0))
    found = tl.min(tl.where((upto > goal) & (weights > 0.0), chunks, last))
    before = tl.sum(tl.where(chunks == found, upto - weights, 0.0))
    left = rest - tl.sum(tl.where(chunks == found, ties_before, 0))
    within = tl.arange(0, CHUNK)
    at = found * CHUNK + within
    peak, least = tl.load(numbers + _PEAK).to(tl.float32), tl.load(numbers + _LEAST)
    row_ptr = logits_ptr + row * logits_stride
    key, each = _weigh(row_ptr, at, at < vocabulary, peak, heat.to(tl.float32), least, EXACT=True)
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
    scratch: Scratch,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> None:
    """Replace the likeliest ``tokens [B]`` of ``logits [B, V]`` (float32), and ``why [B]``, by
    drawn ones where a row has a temperature: see :func:`choose` for what both hold.

    ``words [B, >= 5]`` int64: temperature, top-p, top-k, seed and ``min_p`` of each row as
    `seats.Parameters` holds them; ``positions [B]``: where the tokens will stand. ``has_top_k``,
    ``has_top_p``: whether any row has one; where none has, nothing is searched for.
    """
    num_rows, vocabulary = logits.shape
    count, keys, numbers = triton.cdiv(vocabulary, scratch.chunk), scratch.keys, scratch.numbers
    assert logits.dtype == torch.float32 and logits.stride(1) == words.stride(1) == 1
    assert scratch.weights.shape[0] >= num_rows and scratch.weights.shape[1] == count
    assert tokens.is_contiguous() and why.is_contiguous() and positions.is_contiguous()
    stride, options = logits.stride(0), chained(logits)
    _begin_kernel[(num_rows,)](
        keys, numbers, logits, tokens, why, words, positions, stride, words.stride(0), **options
    )
    for sums in [False] * has_top_k + [True] * has_top_p:
        for each in range(_NUM_SEARCHES):
            _search_kernel[(num_rows, count)](
                keys, numbers, scratch.counts, scratch.sums, scratch.arrived, logits,
                vocabulary, count, stride,
                SUMS=sums, FIRST=each == 0, RANGES=_RANGES, CHUNK=scratch.chunk,
                CHUNKS=block_of(count, least=2), num_warps=4, **options,
            )  # fmt: skip
    _sum_kernel[(num_rows, count)](
        keys, numbers, scratch.weights, scratch.ties, logits, vocabulary, count, stride,
        CHUNK=scratch.chunk, num_warps=4, **options,
    )  # fmt: skip
    num_ends = end_tokens.shape[1]
    _draw_kernel[(num_rows,)](
        tokens, why, keys, numbers, scratch.weights, scratch.ties, logits, end_tokens,
        vocabulary, count, stride, num_ends, end_tokens.stride(0),
        CHUNK=scratch.chunk, CHUNKS=block_of(count, least=2), ENDS=block_of(num_ends),
        num_warps=8, **options,
    )  # fmt: skip
