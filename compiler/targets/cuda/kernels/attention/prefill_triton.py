"""Prefill attention: new tokens of one sequence attend to its pages, which have their keys and
values.

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


@dataclass(frozen=True, slots=True)
class PrefillScratch:
    """Buffers in which programs that share a context store results for the last program.

    Attributes:
        partial: Weighted sums of values, fp32 ``[blocks, H, splits, 64, D]`` flat.
        peaks: Largest scores in base 2, fp32 ``[blocks, H, splits, 64]`` flat.
        totals: Sums of weights, fp32 ``[blocks, H, splits, 64]`` flat.
        arrived: Counters, int32 ``[blocks, H]`` flat. Zero between launches.
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
        blocks = SPLIT_TOKENS // _SPLIT_ROWS * num_heads
        rows = blocks * SPLITS * _SPLIT_ROWS
        return cls(
            torch.empty(rows * head_dim, device=device),
            torch.empty(rows, device=device),
            torch.empty(rows, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
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


class _PageRange(NamedTuple):
    """A split's pages ``first .. stop``, and the number of splits."""

    first: Any
    stop: Any
    num_splits: Any


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
def _share(
    softmax,
    used,
    splits,
    arrived,
    index,
    R: tl.constexpr,
    LAYOUT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store a split of block ``index``. In the last split to arrive, combine all splits in order.

    Return the softmax, and whether this split is the last.
    """
    D: tl.constexpr = LAYOUT.D
    r, d = tl.arange(0, R), tl.arange(0, LAYOUT.E)[None, :]
    first = index.to(tl.int64) * SPLITS
    at = (first + tl.program_id(2)) * R + r
    tl.store(splits.peaks + at, softmax.peak)
    tl.store(splits.totals + at, softmax.total)
    tl.store(splits.sums + at[:, None] * D + d, softmax.sums, mask=d < D)
    # All stores of this program must precede its arrival.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + index, 1, sem="acq_rel", scope="gpu") == used - 1
    if is_last:
        tl.store(arrived + index, 0)
        softmax = _combine(splits, first, used, R, D, LAYOUT.E)
    return softmax, is_last


@triton.jit
def _load_queries(
    q,
    positions,
    first_token,
    token,
    num_tokens,
    inside,
    WORK: tl.constexpr,
    WINDOW: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Load a block's queries at ``q [R, E]`` and its positions."""
    is_token = token < num_tokens
    position = tl.load(positions + token, mask=is_token, other=-1).to(tl.int32)
    values = tl.load(q, mask=inside & (position >= 0)[:, None], other=0.0).to(WORK)
    last = position
    if ENDS:
        end = tl.load(positions + num_tokens + token, mask=is_token, other=0)
        last = end.to(tl.int32) - 1
    # Positions are consecutive: the block's first position, and the oldest position of its
    # windows.
    lowest = tl.load(positions + first_token).to(tl.int32)
    oldest = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else 0
    return _QueryRows(values, position, last, lowest, tl.max(last, 0), oldest)


@triton.jit
def _page_range(rows, SPLITS: tl.constexpr, SPLIT_PAGES: tl.constexpr, L: tl.constexpr):
    """Return the pages of this program's split."""
    used = tl.full([], 1, tl.int32)
    first = rows.oldest // L
    stop = tl.where(rows.newest >= 0, rows.newest // L + 1, first)
    if SPLITS > 1:
        count = tl.maximum(tl.cdiv(stop, SPLITS), SPLIT_PAGES)
        used = tl.maximum(tl.cdiv(stop, count), 1)
        first = tl.program_id(2) * count
        stop = tl.minimum(first + count, stop)
    return _PageRange(first, stop, used)


# specialization would compile some lengths at their first use
@triton.jit(do_not_specialize=["num_tokens"])
def _attend_prefill_kernel(
    q,
    out,
    positions,
    slots,
    num_tokens,
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
    ENDS: tl.constexpr,
):
    """Program (i, h, s) computes R tokens, head h and part s of the context.

    Program 0 has the last tokens, which take longest. With ``ENDS``, the ends of all rows follow
    their positions.
    """
    release_dependents(CHAINED)
    h = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    first_token, d = block.to(tl.int64) * R, tl.arange(0, LAYOUT.E)[None, :]
    token = first_token + tl.arange(0, R)
    inside = (token < num_tokens)[:, None] & (d < LAYOUT.D)
    here = token[:, None] * (H * LAYOUT.D) + h * LAYOUT.D + d
    wait_for_inputs(CHAINED)
    work: tl.constexpr = tl.bfloat16 if LAYOUT.BFP8 else values.dtype.element_ty
    rows = _load_queries(
        q + here, positions, first_token, token, num_tokens, inside, work, WINDOW, ENDS
    )
    table = tables + tl.load(slots + first_token) * table_width
    cache = _PagedKV(PagePointers(values, exponents), table, h // (H // LAYOUT.G))
    pages, is_last = _page_range(rows, SPLITS, SPLIT_PAGES, LAYOUT.L), tl.program_id(2) == 0
    softmax = _attend_pages(rows, pages.first, pages.stop, cache, scale, WINDOW, R, LAYOUT, CHAINED)
    if SPLITS > 1:  # noqa: SIM102 (a constant, and a branch)
        if (pages.num_splits > 1) & (tl.program_id(2) < pages.num_splits):
            splits = SplitPointers(peaks, totals, partial)
            softmax, is_last = _share(
                softmax, pages.num_splits, splits, arrived, block * H + h, R, LAYOUT, SPLITS
            )
    total, is_real = softmax.total, rows.position >= 0
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + h) * 1.4426950408889634 - softmax.peak)
    total = tl.where(is_real, total, float("inf"))
    result = tl.where(is_real[:, None], softmax.sums / total[:, None], 0.0)
    out += token[:, None] * out_stride + h * LAYOUT.D + d
    tl.store(out, result.to(out.dtype.element_ty), mask=inside & is_last)


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
    block: int = 0,
    scratch: PrefillScratch | None = None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Attend causally from rotated queries to the pages.

    The pages contain the keys and values of the new tokens. The arithmetic is bf16 with fp32 sums
    and softmax, or fp32 with fp32 pages. See :func:`ops.attention.attention_step` for ``scale`` and
    ``window``.

    Args:
        q: Rotated queries ``[T, H, D]``.
        out: ``[T, H D]``.
        positions: int64 ``[T]``, consecutive in a block. Negative positions at the end of a block
            are padding with zero outputs.
        slots: int64 ``[T]``, equal in a block.
        block_tables: Page tables, int32 ``[S, M]``.
        block: Rows in a block: 64 or 128. 0: all tokens belong to one sequence.
        scratch: Buffers for long context splits. None, or a sliding window: no splits.
        sinks: A further score per head, float32 ``[H]``. None: none.
        ends: Position after the last visible position, int64 ``[T]``, ascending. None: causal.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.is_contiguous() and out.stride(1) == 1 and pages.head_dim == head_dim
    assert slots.shape == positions.shape == (num_tokens,)
    tile = _tile(min(num_tokens, _MAX_SMALL_M if block == 64 else num_tokens), pages)
    assert block % tile["R"] == 0
    shares = scratch is not None and not window and num_tokens <= SPLIT_TOKENS
    splits = SPLITS if shares and tile["R"] == _SPLIT_ROWS else 1
    buffers = scratch.buffers if scratch else (q,) * 4
    _attend_prefill_kernel[(cdiv(num_tokens, tile["R"]), num_heads, splits)](
        q,
        out,
        positions if ends is None else torch.cat((positions, ends)),
        slots,
        num_tokens,
        out.stride(0),
        scale * LOG2_E,
        sinks,
        *buffers,
        **page_arguments(pages, block_tables),
        SPLITS=splits,
        SPLIT_PAGES=SPLIT_PAGES,
        H=num_heads,
        WINDOW=window,
        ENDS=ends is not None,
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
