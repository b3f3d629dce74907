"""Search for a top-k or top-p cutoff without a sort.

A token's key is its scaled distance below the largest logit, as a bit pattern. The search finds
the last key digit by digit, from counts or weights over key ranges. Counts use 32 ranges. Weights,
which cost more, use 16 and then 8. The addition order does not depend on the batch. Shape
letters: B rows, V logits, C chunks in a row, N ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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

CHUNK = 2048
"""Logits for a program."""


@dataclass(frozen=True, slots=True)
class CutoffSearch:
    """Ranges in a search by counts or by weights.

    Attributes:
        first: Ranges in the first launch.
        parts: The first launch cuts with step ``1 / parts``.
        ranges: Ranges in later launches, a power of two. They cut the remaining keys, at most 2 **
            30.
    """

    first: int
    parts: int
    ranges: int

    @property
    def bits(self) -> int:
        """Bits in a digit."""
        return self.ranges.bit_length() - 1

    @property
    def num_launches(self) -> int:
        """Launch count: the first, then a launch for every digit in 30 bits."""
        return 1 + -(-30 // self.bits)


BY_COUNTS, BY_SUMS = CutoffSearch(32, 2, 32), CutoffSearch(16, 1, 8)
_MOST_RANGES = tl.constexpr(32)
END = tl.constexpr(0x7F800000)  # above all keys of tokens
_LEAST_SCALED = tl.constexpr(-745.1332)  # smaller weights are 0 in float64
# -(2 ** -29); above it, several logits have equal weights
_TINY = tl.constexpr(-1.862645149230957e-09)

# Columns of `SearchScratch.keys` and of `SearchScratch.numbers`.
LOW, HIGH, REST, FROM, UPTO, RANGE, BUSY = (tl.constexpr(at) for at in range(7))
HEAT, PEAK, RANDOM, SHARE, LEAST, BEFORE, GOAL, TOP_K = (tl.constexpr(at) for at in range(8))


@dataclass(frozen=True, slots=True)
class SearchScratch:
    """Buffers for B rows.

    Attributes:
        keys, numbers: Search state, int32 and float64 ``[B, 8]``.
        counts, sums: Counts and weights by key range, int32 and float64 ``[B, C, N]``.
        arrived: Counters, int32 ``[B]``. Zero between launches.
        weights, ties: Weights and ties by chunk, float64 and int32 ``[B, C]``.
        chunk: Logits for a program.
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
        """Allocate buffers. A program has ``chunk`` logits, a power of 2."""
        count = cdiv(vocabulary, chunk)
        return cls(
            torch.empty(num_rows, 8, dtype=torch.int32, device=device),
            torch.empty(num_rows, 8, dtype=torch.float64, device=device),
            torch.empty(num_rows, count, _MOST_RANGES.value, dtype=torch.int32, device=device),
            torch.empty(num_rows, count, _MOST_RANGES.value, dtype=torch.float64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_rows, count, dtype=torch.float64, device=device),
            torch.empty(num_rows, count, dtype=torch.int32, device=device),
            chunk,
        )


@triton.jit
def weigh(logits_ptr, at, inside, peak, heat, least, EXACT: tl.constexpr):
    """Return the logit keys, `END` for excluded tokens, and their weights (0 unless EXACT)."""
    logits = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(logits - peak, heat)
    there = inside & (scaled > _LEAST_SCALED)
    scaled = tl.where(there, scaled, 0.0)
    wide = scaled.to(tl.float64)
    below = tl.where(scaled > _TINY, (1.0 - (1.0 + wide)).to(tl.float32), -scaled)
    below = tl.where(below == 0.0, 0.0, below)  # without a negative zero
    weights = tl.zeros_like(wide)
    if EXACT:
        weights = tl.where(there, tl.exp(wide), 0.0)
        there &= weights >= least
        weights = tl.where(there, weights, 0.0)
    elif least > 0.0:
        there = there & (tl.exp(wide) >= least)
    return tl.where(there, below.to(tl.int32, bitcast=True), END), weights


@triton.jit
def weight_of(key):
    """Return the weight of all tokens with a key."""
    return tl.exp(-(key.to(tl.float32, bitcast=True).to(tl.float64)))


@triton.jit
def _has_filter(numbers, SUMS: tl.constexpr):
    """Return whether a row uses top-k or, with SUMS, top-p."""
    is_used = tl.load(numbers + SHARE) < 1.0 if SUMS else tl.load(numbers + TOP_K) > 0.0
    return is_used & (tl.load(numbers + HEAT) > 0.0)


@triton.jit
def _shift_of(num_keys, BITS: tl.constexpr):
    """Return the shift to the highest BITS bits of the offsets in a key range."""
    shift = num_keys * 0
    for bit in tl.static_range(BITS, 31):
        shift += (num_keys > (1 << bit)).to(tl.int32)
    return shift


@triton.jit
def _measure(
    row_ptr,
    numbers,
    at,
    inside,
    start,
    stop,
    shift,
    SUMS: tl.constexpr,
    FIRST: tl.constexpr,
    RANGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the key count in each range, and their weights (0 unless SUMS)."""
    peak, heat = tl.load(numbers + PEAK).to(tl.float32), tl.load(numbers + HEAT).to(tl.float32)
    least = tl.load(numbers + LEAST)
    key, weights = weigh(row_ptr, at, inside, peak, heat, least, EXACT=SUMS)
    if FIRST:
        which = tl.minimum(key.to(tl.float32, bitcast=True) * PARTS, RANGES - 1.0).to(tl.int32)
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
    keys_ptr,
    numbers_ptr,
    counts_ptr,
    sums_ptr,
    arrived_ptr,
    logits_ptr,
    vocabulary,
    num_chunks,
    logits_stride,
    SUMS: tl.constexpr,
    FIRST: tl.constexpr,
    RANGES: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Find the next digit in a cutoff key, for top-k or, with SUMS, for top-p.

    The last program of a row narrows the range for the next launch.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, numbers = keys_ptr + row * 8, numbers_ptr + row * 8
    if FIRST:
        if not _has_filter(numbers, SUMS):
            tl.store(keys + BUSY, 0)
            return
        start, stop = 0, tl.load(keys + LOW)
    else:
        if tl.load(keys + BUSY) == 0:
            return
        start, stop = tl.load(keys + FROM), tl.load(keys + UPTO)
    shift = _shift_of(stop - start, BITS)
    own = (row * num_chunks + chunk) * _MOST_RANGES
    is_empty = stop < 0
    if not FIRST:  # an empty range remains empty in all later launches
        is_empty = tl.load(counts_ptr + own + tl.load(keys + RANGE)) == 0
    counts, sums = tl.zeros([RANGES], tl.int32), tl.zeros([RANGES], tl.float64)
    if not is_empty:
        at, row_ptr = chunk * CHUNK + tl.arange(0, CHUNK), logits_ptr + row * logits_stride
        counts, sums = _measure(
            row_ptr, numbers, at, at < vocabulary, start, stop, shift, SUMS, FIRST, RANGES, PARTS
        )
    tl.store(counts_ptr + own + tl.arange(0, RANGES), counts)
    if SUMS:
        tl.store(sums_ptr + own + tl.arange(0, RANGES), sums)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row, 0)
        first = row * num_chunks * _MOST_RANGES
        counts, sizes = _totals(
            counts_ptr + first, sums_ptr + first, num_chunks, SUMS, RANGES, CHUNKS
        )
        _narrow(keys, numbers, counts, sizes, start, stop, shift, SUMS, FIRST, RANGES, PARTS)


@triton.jit
def _totals(
    counts_ptr,
    sums_ptr,
    num_chunks,
    SUMS: tl.constexpr,
    RANGES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return counts by range over all chunks, and the search sizes: counts or weights."""
    chunks = tl.arange(0, CHUNKS)
    every = chunks[:, None] * _MOST_RANGES + tl.arange(0, RANGES)[None, :]
    inside = chunks[:, None] < num_chunks
    counts = tl.sum(tl.load(counts_ptr + every, mask=inside, other=0, cache_modifier=".cg"), 0)
    sizes = counts.to(tl.float64)
    if SUMS:
        sizes = tl.sum(tl.load(sums_ptr + every, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    return counts, sizes


@triton.jit
def _narrow(
    keys,
    numbers,
    counts,
    sizes,
    start,
    stop,
    shift,
    SUMS: tl.constexpr,
    FIRST: tl.constexpr,
    RANGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Continue with the last nonempty range that starts below the goal. A range with one key ends
    the search.
    """
    ranges = tl.arange(0, RANGES)
    before = 0.0 * tl.sum(sizes)
    if not FIRST:
        before = tl.load(numbers + BEFORE)
    goal = tl.load(numbers + TOP_K)
    ends_above = before < 0.0
    if SUMS:
        goal = tl.load(numbers + GOAL)
        if FIRST:
            rest, below, one = tl.load(keys + REST), tl.sum(sizes), weight_of(stop)
            share = tl.load(numbers + SHARE)
            goal = share * (below + tl.where(rest > 0, rest.to(tl.float64) * one, 0.0))
            # the cutoff is at top-k's, or earlier among equal keys
            ends_above = below < goal
            if ends_above:
                tl.store(keys + REST, _count_before(below, one, goal, rest))
    befores = before + tl.cumsum(sizes, 0) - sizes
    found = tl.max(tl.where((befores < goal) & (counts > 0), ranges, -1))
    found = tl.where(found < 0, tl.min(tl.where(counts > 0, ranges, RANGES - 1)), found)
    before = tl.sum(tl.where(ranges == found, befores, 0.0))
    count = tl.sum(tl.where(ranges == found, counts, 0))
    if FIRST:
        least = found.to(tl.float32) / PARTS
        low = least.to(tl.int32, bitcast=True)
        high = tl.where(found == RANGES - 1, stop, (least + 1.0 / PARTS).to(tl.int32, bitcast=True))
    else:
        low, high = start + (found << shift), start + ((found + 1) << shift)
    high = tl.minimum(high, stop)
    is_found = (high - low == 1) & (not ends_above)
    tl.store(numbers + BEFORE, before)
    tl.store(numbers + GOAL, goal)
    tl.store(keys + FROM, low)
    tl.store(keys + UPTO, high)
    tl.store(keys + RANGE, found)
    tl.store(keys + BUSY, tl.where(is_found | ends_above, 0, 1))
    if is_found:
        tl.store(keys + LOW, low)
        tl.store(keys + HIGH, high)
        # A cutoff by top-k among equal keys retains only as many as top-k leaves.
        one = weight_of(low) if SUMS else 1.0
        tl.store(keys + REST, _count_before(before, one, goal, count))


@triton.jit
def _count_before(before, one, goal, limit):
    """Return how many of ``limit`` equal weights start below a goal, at least 1."""
    count = tl.minimum(tl.ceil((goal - before) / one), limit.to(tl.float64))
    count = tl.where(before + (count - 1.0) * one < goal, count, count - 1.0)
    count = tl.where((before + count * one < goal) & (count < limit), count + 1.0, count)
    return tl.maximum(count, 1.0).to(tl.int32)


def search(logits: Tensor, scratch: SearchScratch, how: CutoffSearch) -> None:
    """Find the cutoff key for the rows of ``logits [B, V]``, from the initial state in
    ``scratch``.
    """
    num_rows, vocabulary = logits.shape
    count = cdiv(vocabulary, scratch.chunk)
    for each in range(how.num_launches):
        is_first = each == 0
        _search_kernel[(num_rows, count)](
            scratch.keys,
            scratch.numbers,
            scratch.counts,
            scratch.sums,
            scratch.arrived,
            logits,
            vocabulary,
            count,
            logits.stride(0),
            SUMS=how is BY_SUMS,
            FIRST=is_first,
            PARTS=how.parts,
            BITS=how.bits,
            RANGES=how.first if is_first else how.ranges,
            CHUNK=scratch.chunk,
            CHUNKS=block_of(count, minimum=2),
            num_warps=4,
            **chained(logits),
        )
