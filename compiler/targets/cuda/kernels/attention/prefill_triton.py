"""Prefill attention: new tokens of sequences attend to the pages of their sequence, which have
their keys and values.

Shape letters: T tokens, H query heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    PagePointers,
    Softmax,
    SplitPointers,
    empty_softmax,
    load_tile,
    page_arguments,
    product,
    tile_values,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    LOG2_E,
    cdiv,
    chained,
    has_large_tiles,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.state.pages import KVPages
from tilewright.compiler.targets.cuda.tuning import tuning

# A score below all real scores. It is finite, so that rows without visible keys give no NaN.
HIDDEN = tl.constexpr(-1.0e30)
# Use the same fusion for masked and unmasked pages: separate loops would round differently.
_FUSES = False

_TUNING = tuning()["attention"]["prefill"]
_MAX_SMALL_M: int = _TUNING["few_tokens"]  # maximum prompt length for more, smaller programs

SPLITS: int = _TUNING["splits"]
"""Programs that share a block's context if scratch is available."""

SPLIT_TOKENS: int = _TUNING["split_tokens"]
"""Maximum tokens of a launch with splits. Longer launches fill the device without splits."""

SPLIT_PAGES: int = _TUNING["split_pages"]
"""Minimum context in pages for a split."""

_SPLIT_ROWS = 64

MAX_CHUNKS = 8
"""Maximum chunks in a launch."""
_CHUNKS = tl.constexpr(MAX_CHUNKS)


@dataclass(frozen=True, slots=True)
class PrefillScratch:
    """Buffers in which programs that share a context store results for the last program.

    Attributes:
        partial: Weighted sums of values, fp32 ``[H, programs, 64, D]`` flat.
        peaks: Largest scores in base 2, fp32 ``[H, programs, 64]`` flat.
        totals: Sums of weights, fp32 ``[H, programs, 64]`` flat.
        arrived: Counters, int32 ``[H, programs]`` flat. Zero between launches.
    """

    partial: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    arrived: torch.Tensor

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all buffers in the order of kernel arguments."""
        return self.partial, self.peaks, self.totals, self.arrived

    @classmethod
    def empty(cls, num_heads: int, head_dim: int, device: torch.device) -> PrefillScratch:
        """Allocate buffers for consecutive launches with up to `SPLIT_TOKENS` tokens."""
        programs = num_heads * _num_programs(SPLIT_TOKENS // _SPLIT_ROWS, SPLITS, MAX_CHUNKS)
        rows = programs * _SPLIT_ROWS
        return cls(
            torch.empty(rows * head_dim, device=device),
            torch.empty(rows, device=device),
            torch.empty(rows, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )


class _PagedKV(NamedTuple):
    """The program's cache in a kernel: pages, page table, and key/value head."""

    pages: Any
    table: Any
    g: Any


class _QueryRows(NamedTuple):
    """A block's queries in a kernel. Keys before ``oldest`` or after ``newest`` are not read.

    ``position`` and ``last``, the last visible position, are ``[R]``. Positions are consecutive,
    from ``lowest``.
    """

    q: Any
    position: Any
    last: Any
    lowest: Any
    newest: Any
    oldest: Any


class _PrefillBlock(NamedTuple):
    """A program's tokens ``first .. stop`` of a chunk, and its split of their context.

    It computes up to R tokens. ``program`` is the index in the order of tokens and splits, negative
    without tokens. A split has ``num_pages`` pages.
    """

    first: Any
    stop: Any
    program: Any
    split: Any
    num_splits: Any
    num_pages: Any


@triton.jit
def _add_pages(
    softmax,
    rows,
    first,
    stop,
    cache,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add the pages ``first .. stop`` to the softmax of ``rows``.

    ``MASKED``: hide keys after a row's last visible position or before its window.
    """
    G: tl.constexpr = LAYOUT.G
    L: tl.constexpr = LAYOUT.L
    peak, total, sums = softmax
    for page in range(first, stop):
        number = tl.load(cache.table + page).to(tl.int64)
        row = (number * 2 * G + cache.g) * L
        at = page * L + tl.arange(0, L)
        valid = tl.full([L], True, tl.int1)
        if MASKED:
            valid = (at <= rows.newest) & (at >= rows.oldest)
        keys = tile_values(load_tile(cache.pages, row, valid, LAYOUT), LAYOUT, CHAINED)
        start = tl.zeros([rows.q.shape[0], L], tl.float32)
        scores = product(rows.q, tl.trans(keys), start, CHAINED) * scale
        if MASKED:
            seen = at[None, :] <= rows.last[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > rows.position[:, None] - WINDOW)
            scores = tl.where(seen, scores, HIDDEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        vals = tile_values(load_tile(cache.pages, row + G * L, valid, LAYOUT), LAYOUT, CHAINED)
        sums = product(weights.to(vals.dtype), vals, sums * fade[:, None], CHAINED)
        peak = new_peak
    return Softmax(peak, total, sums)


@triton.jit
def _attend_pages(
    rows,
    first,
    stop,
    cache,
    scale,
    WINDOW: tl.constexpr,
    R: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return the softmax of ``rows`` over the pages ``first .. stop``. The range may be empty."""
    L: tl.constexpr = LAYOUT.L
    softmax = empty_softmax(HIDDEN, R, LAYOUT.E)
    # Pages first .. begin and full .. stop have keys hidden from some row.
    begin = first
    full = tl.minimum(tl.maximum((rows.lowest + 1) // L, first), stop)
    if WINDOW > 0:
        begin = tl.minimum(tl.maximum(rows.newest - WINDOW + L, 0) // L, stop)
        full = tl.maximum(full, begin)
        softmax = _add_pages(
            softmax, rows, first, begin, cache, scale, True, WINDOW, LAYOUT, CHAINED
        )
    softmax = _add_pages(softmax, rows, begin, full, cache, scale, False, WINDOW, LAYOUT, CHAINED)
    return _add_pages(softmax, rows, full, stop, cache, scale, True, WINDOW, LAYOUT, CHAINED)


@triton.jit
def _combine(splits, first, used, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Return the softmax of a block's splits, in order."""
    r, d = tl.arange(0, R), tl.arange(0, E)[None, :]
    peak, total, sums = empty_softmax(HIDDEN, R, E)
    for other in range(used):
        at = (first + other) * R + r
        its = tl.load(splits.peaks + at)
        new_peak = tl.maximum(peak, its)
        fade, its_fade = tl.exp2(peak - new_peak), tl.exp2(its - new_peak)
        total = total * fade + tl.load(splits.totals + at) * its_fade
        its_sums = tl.load(splits.sums + at[:, None] * D + d, mask=d < D, other=0.0)
        sums = sums * fade[:, None] + its_sums * its_fade[:, None]
        peak = new_peak
    return Softmax(peak, total, sums)


@triton.jit
def _share(softmax, block, splits, arrived, R: tl.constexpr, LAYOUT: tl.constexpr):
    """Store this program's split. In the last split to arrive, combine all splits in order.

    Return the softmax, and whether this split is the last.
    """
    D: tl.constexpr = LAYOUT.D
    r, d = tl.arange(0, R), tl.arange(0, LAYOUT.E)[None, :]
    first = (tl.program_id(1) * tl.num_programs(0) + block.program - block.split).to(tl.int64)
    at = (first + block.split) * R + r
    tl.store(splits.peaks + at, softmax.peak)
    tl.store(splits.totals + at, softmax.total)
    tl.store(splits.sums + at[:, None] * D + d, softmax.sums, mask=d < D)
    # All stores of this program must precede its arrival.
    tl.debug_barrier()
    count = tl.atomic_add(arrived + first, 1, sem="acq_rel", scope="gpu") + 1
    is_last = count == block.num_splits
    if is_last:
        tl.store(arrived + first, 0)
        softmax = _combine(splits, first, block.num_splits, R, D, LAYOUT.E)
    return softmax, is_last


@triton.jit
def _with_splits(
    softmax,
    block,
    splits,
    arrived,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Return the softmax, and whether this program stores it: without splits, or as the last."""
    is_last = block.num_splits == 1
    if SPLITS > 1:  # noqa: SIM102 (a constant, and a branch)
        if block.num_splits > 1:
            softmax, is_last = _share(softmax, block, splits, arrived, R, LAYOUT)
    return softmax, is_last


@triton.jit
def _find_block(
    starts,
    positions,
    num_chunks,
    num_tokens,
    SPLITS: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
):
    """Return this program's block and split.

    Blocks have R tokens. Every chunk begins with a new block. Without chunks, all tokens are a
    chunk. Long contexts have up to SPLITS programs per block, fewer for more blocks. Padding counts
    as context of the last chunk.
    """
    chunk = tl.arange(0, _CHUNKS)
    is_chunk = chunk < num_chunks
    first = tl.load(starts + chunk, mask=is_chunk, other=0).to(tl.int32)
    first = tl.where(is_chunk | (chunk == 0), first, num_tokens)
    stop = tl.load(starts + chunk + 1, mask=is_chunk, other=0).to(tl.int32)
    stop = tl.where(is_chunk, stop, num_tokens)
    num_blocks = tl.cdiv(stop - first, R)
    num_splits = tl.full([_CHUNKS], 1, tl.int32)
    num_pages = tl.full([_CHUNKS], 0, tl.int32)
    if SPLITS > 1:
        start = tl.load(positions + first, mask=first < stop, other=0).to(tl.int32)
        length = tl.maximum(start, 0) + stop - first
        most = tl.minimum(SPLITS, tl.num_programs(0) // tl.sum(num_blocks, 0))
        num_pages = tl.maximum(tl.cdiv(tl.cdiv(length, L), most), SPLIT_PAGES)
        num_splits = tl.maximum(tl.cdiv(tl.cdiv(length, L), num_pages), 1)
    count = num_blocks * num_splits
    program = tl.sum(count, 0) - 1 - tl.program_id(0)
    index = program - (tl.cumsum(count, 0) - count)
    is_own = (index >= 0) & (index < count)
    return _PrefillBlock(
        tl.sum(tl.where(is_own, first + index // num_splits * R, 0), 0),
        tl.sum(tl.where(is_own, stop, 0), 0),
        program,
        tl.sum(tl.where(is_own, index % num_splits, 0), 0),
        tl.sum(tl.where(is_own, num_splits, 0), 0),
        tl.sum(tl.where(is_own, num_pages, 0), 0),
    )


@triton.jit
def _load_queries(
    q,
    positions,
    ends,
    first_token,
    token,
    inside,
    is_token,
    WORK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Load a block's queries at ``q [R, E]`` and its positions."""
    position = tl.load(positions + token, mask=is_token, other=-1).to(tl.int32)
    values = tl.load(q, mask=inside & (position >= 0)[:, None], other=0.0).to(WORK)
    last = position
    if ends is not None:
        last = tl.load(ends + token, mask=is_token, other=0).to(tl.int32) - 1
    # Positions are consecutive: the block's first position, and the oldest position of its
    # windows.
    lowest = tl.load(positions + first_token).to(tl.int32)
    oldest = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else 0
    return _QueryRows(values, position, last, lowest, tl.max(last, 0), oldest)


@triton.jit
def _page_range(rows, block, SPLITS: tl.constexpr, L: tl.constexpr):
    """Return the first page of this program's split, and its end."""
    first = rows.oldest // L
    stop = tl.where(rows.newest >= 0, rows.newest // L + 1, first)
    if SPLITS > 1:
        first = block.split * block.num_pages
        stop = tl.minimum(first + block.num_pages, stop)
    return first, stop


@triton.jit
def _result(softmax, position, sinks, h):
    """Return the weighted means of values. Tokens without a position have zeros."""
    total, is_real = softmax.total, position >= 0
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + h) * 1.4426950408889634 - softmax.peak)
    total = tl.where(is_real, total, float("inf"))
    return tl.where(is_real[:, None], softmax.sums / total[:, None], 0.0)


# specialization would compile some lengths at their first use
@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _attend_prefill_kernel(
    q,
    out,
    positions,
    ends,
    slots,
    num_tokens,
    starts,
    num_chunks,
    out_stride,
    scale,
    sinks,
    partial,
    peaks,
    totals,
    arrived,
    values,
    exponents,
    tables,
    table_width,
    SPLITS: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, h) computes head h for up to R tokens of a chunk, over a split of the context.

    Program 0 has the last tokens, which take longest.
    """
    release_dependents(CHAINED)
    h = tl.program_id(1)
    # No kernel of the step writes the starts and positions.
    block = _find_block(starts, positions, num_chunks, num_tokens, SPLITS, SPLIT_PAGES, R, LAYOUT.L)
    if block.program < 0:
        return
    first_token, d = block.first.to(tl.int64), tl.arange(0, LAYOUT.E)[None, :]
    token = first_token + tl.arange(0, R)
    is_token = token < block.stop
    inside = is_token[:, None] & (d < LAYOUT.D)
    here = token[:, None] * (H * LAYOUT.D) + h * LAYOUT.D + d
    wait_for_inputs(CHAINED)
    dtype: tl.constexpr = tl.bfloat16 if LAYOUT.BFP8 else values.dtype.element_ty
    rows = _load_queries(
        q + here, positions, ends, first_token, token, inside, is_token, dtype, WINDOW
    )
    table = tables + tl.load(slots + first_token) * table_width
    cache = _PagedKV(PagePointers(values, exponents), table, h // (H // LAYOUT.G))
    first, stop = _page_range(rows, block, SPLITS, LAYOUT.L)
    softmax = _attend_pages(rows, first, stop, cache, scale, WINDOW, R, LAYOUT, CHAINED)
    splits = SplitPointers(peaks, totals, partial)
    softmax, is_last = _with_splits(softmax, block, splits, arrived, SPLITS, R, LAYOUT)
    result = _result(softmax, rows.position, sinks, h).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * out_stride + h * LAYOUT.D + d, result, mask=inside & is_last)


def _num_programs(num_whole: int, splits: int, num_chunks: int) -> int:
    """Return the programs per head for tokens that fill ``num_whole`` blocks in a single chunk.

    Every further chunk may need a further block.
    """
    return num_whole * splits + max(num_chunks - 1, 0)


def attend_prefill(
    pages: KVPages,
    q: torch.Tensor,
    *,
    out: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int = 0,
    starts: torch.Tensor | None = None,
    is_short: bool = False,
    scratch: PrefillScratch | None = None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Attend causally from rotated queries to the pages.

    The arithmetic is bf16 with fp32 sums, or fp32 with fp32 pages. See
    :func:`ops.attention.attention_step` for ``scale`` and ``window``.

    Args:
        q: Rotated queries ``[T, H, D]``.
        out: ``[T, H D]``.
        positions: int64 ``[T]``, consecutive in a chunk. Negative: padding, at its end.
        slots: int64 ``[T]``, equal in a chunk.
        block_tables: Page tables, int32 ``[S, M]``.
        starts: Ascending starts of P chunks and their end T, int64 ``[P + 1]``. None: a chunk.
        is_short: Use small programs. Else the token count selects their size.
        scratch: Buffers for long context splits, which depend on all chunks. None: no splits.
        sinks: A further score per head, float32 ``[H]``. None: none.
        ends: Position after the last visible position, int64 ``[T]``, ascending. None: causal.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.is_contiguous() and out.stride(1) == 1 and pages.head_dim == head_dim
    tile = _tile(min(num_tokens, _MAX_SMALL_M if is_short else num_tokens), pages)
    num_chunks = 0 if starts is None else len(starts) - 1
    assert num_chunks <= MAX_CHUNKS
    fits = num_tokens <= SPLIT_TOKENS and tile["R"] == _SPLIT_ROWS
    splits = SPLITS if scratch is not None and not window and fits else 1
    sizes = {"SPLITS": splits, "SPLIT_PAGES": SPLIT_PAGES, "H": num_heads, "WINDOW": window}
    num_programs = _num_programs(cdiv(num_tokens, tile["R"]), splits, num_chunks)
    _attend_prefill_kernel[(num_programs, num_heads)](
        q,
        out,
        positions,
        ends,
        slots,
        num_tokens,
        positions if starts is None else starts,
        num_chunks,
        out.stride(0),
        scale * LOG2_E,
        sinks,
        *(scratch.buffers if scratch else (q,) * 4),
        **page_arguments(pages, block_tables),
        **sizes,
        **tile,
        **chained(q),
    )


def _tile(num_tokens: int, pages: KVPages) -> dict[str, int]:
    """Return a program's rows, and its launch options."""
    if pages.values.itemsize == 4:
        tile = _TUNING["tiles"]["fp32"]
    else:
        tiles = _TUNING["tiles"]["wide" if pages.head_dim > 128 else "usual"]
        is_small = pages.head_dim > 128 and not has_large_tiles(pages.values)
        tile = tiles["few" if is_small or num_tokens <= _MAX_SMALL_M else "many"]
    rows, num_warps, num_stages = tile
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": _FUSES}
    return {"R": rows, **options}
