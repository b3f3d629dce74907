"""Decode attention over the paged cache, with rotation and the cache write.

A row's result depends on its position and table width only: the splits of its pages do not depend
on the batch size and are combined in order. Shape letters: B rows, H query heads, G key/value
heads, D head size, S slots, M pages of a slot.
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
    load_rotation,
    load_tile,
    page_arguments,
    product,
    store_rows,
    store_split,
    tile_values,
    turn_of,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    LOG2_E,
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages
from tilewright.compiler.targets.cuda.tuning import tuning

_TUNING = tuning()["attention"]["decode_triton"]
MAX_SPLITS: int = _TUNING["max_splits"]
"""Maximum number of splits for a sequence."""

PROGRAMS: int = _TUNING["programs"]
"""Approximate number of programs in a launch: two for each of 132 multiprocessors, as registers
allow. With more splits, a program walks over several.
"""


MAX_TOGETHER = 8
"""Maximum number of splits for a single launch. More splits are combined by a second launch."""


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Buffers in which the splits of a launch store their results for the last program.

    Attributes:
        partial: Weighted sums of values, fp32 ``[rows, H, splits, D]`` flat.
        peaks: Largest scores in base 2, fp32 ``[rows, H, splits]`` flat.
        totals: Sums of weights, fp32 ``[rows, H, splits]`` flat.
        arrived: Counters, int32 ``[rows, H]`` flat. Zero between launches.
    """

    partial: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    arrived: torch.Tensor

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all buffers in the order of kernel arguments."""
        return self.partial, self.peaks, self.totals, self.arrived

    def check(self, num_splits: int, head_dim: int) -> None:
        """Check that the buffers are large enough for ``num_splits`` results."""
        assert self.partial.numel() >= num_splits * head_dim
        assert self.peaks.numel() >= num_splits


def decode_scratch(
    max_rows: int, num_heads: int, head_dim: int, num_pages: int, device: torch.device
) -> DecodeScratch:
    """Allocate buffers for up to ``max_rows`` rows and ``num_pages`` pages in a table.

    Consecutive launches on a stream may share them.
    """
    rows = max_rows * num_heads
    splits = rows * min(MAX_SPLITS, num_pages)
    return DecodeScratch(
        partial=torch.empty(splits * head_dim, device=device),
        peaks=torch.empty(splits, device=device),
        totals=torch.empty(splits, device=device),
        arrived=torch.zeros(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _heads(token, first, count, partner, R: tl.constexpr, D: tl.constexpr):
    """Load ``count`` heads of a token from ``first``, and their partner channels, as fp32 ``[R,
    E]``.
    """
    r = tl.arange(0, R)[:, None]
    d = tl.arange(0, partner.shape[0])[None, :]
    inside = (r < count) & (d < D)
    at = token + (first + r) * D
    own = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    return own, other


class _RowCache(NamedTuple):
    """A row's cache in a kernel: pages, page table, position, and the program's key/value head."""

    pages: Any
    table: Any
    position: Any
    g: Any


class _Splits(NamedTuple):
    """The splits of a row's pages: first and end page, pages in a split, and split count."""

    first: Any
    end: Any
    size: Any
    count: Any


class _NewToken(NamedTuple):
    """A new token's heads, fp32. ``_other`` has the partner channels."""

    q: Any
    q_other: Any
    k: Any
    k_other: Any
    v: Any


class _Query(NamedTuple):
    """Rotated queries ``[R, E]``, their scores with the new token's key, its value, and a scale."""

    q: Any
    own_score: Any
    v: Any
    scale: Any


class _HeadGroup(NamedTuple):
    """The query heads of a key/value head: first head, its first split, and splits of a head."""

    first_head: Any
    first_split: Any
    num_splits: Any


class _HeadOutput(NamedTuple):
    """A program's output, and the sinks of all heads."""

    ptr: Any
    sinks: Any


@triton.jit
def _plan(position, num_splits, WINDOW: tl.constexpr, L: tl.constexpr):
    """Return the splits of a row. Padding has no splits."""
    last = tl.maximum(position, 0)
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // L
    end = last // L + 1
    size = tl.cdiv(end - first, num_splits)
    count = tl.where(position < 0, 0, tl.cdiv(end - first, size))
    return _Splits(first, end, size, count)


@triton.jit
def _page_tiles(cache, page, wanted, WINDOW: tl.constexpr, LAYOUT: tl.constexpr):
    """Load a page's keys and values without decoding, if it is ``wanted``."""
    G: tl.constexpr = LAYOUT.G
    L: tl.constexpr = LAYOUT.L
    number = tl.load(cache.table + page, mask=wanted, other=0).to(tl.int64)
    at = page * L + tl.arange(0, L)
    valid = (at < cache.position) & wanted
    if WINDOW > 0:
        valid = valid & (at > cache.position - WINDOW)
    offset = (number * 2 * G + cache.g) * L
    k = load_tile(cache.pages, offset, valid, LAYOUT)
    v = load_tile(cache.pages, offset + G * L, valid, LAYOUT)
    return k, v


@triton.jit
def _add_page(
    softmax,
    query,
    k,
    v,
    page,
    position,
    WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add a page's tiles to the softmax of queries."""
    L: tl.constexpr = LAYOUT.L
    k, v = tile_values(k, LAYOUT, CHAINED), tile_values(v, LAYOUT, CHAINED)
    at = page * L + tl.arange(0, L)
    valid = at < position
    if WINDOW > 0:
        valid = valid & (at > position - WINDOW)
    start = tl.zeros([query.q.shape[0], L], tl.float32)
    scores = product(query.q, tl.trans(k), start, CHAINED) * query.scale
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(softmax.peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(softmax.peak - new_peak)
    total = softmax.total * fade + tl.sum(weights, 1)
    sums = product(weights.to(v.dtype), v, softmax.sums * fade[:, None], CHAINED)
    return Softmax(new_peak, total, sums)


@triton.jit
def _with_sinks(total, peak, sinks, head):
    """Add the sink's weight to the sum of weights of each ``head [R]``."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - peak)
    return total


@triton.jit
def _store_heads(out, x, is_real, D: tl.constexpr, E: tl.constexpr):
    """Store outputs ``[R, E]`` of real heads."""
    r, d = tl.arange(0, is_real.shape[0])[:, None], tl.arange(0, E)[None, :]
    tl.store(out + r * D + d, x, mask=is_real[:, None] & (d < D))


@triton.jit
def _combine(splits, at, used, sinks, head, R: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Return the combined splits ``[R, E]`` of R heads, in order.

    ``at [R]`` is each head's first split. Loads bypass the L1 cache because peer programs
    wrote the data.
    """
    CHUNK: tl.constexpr = max(1, 8192 // (R * E))
    d = tl.arange(0, E)[None, None, :]
    peak, total, acc = empty_softmax(float("-inf"), R, E)
    for start in range(0, used, CHUNK):
        split = start + tl.arange(0, CHUNK)[:, None]
        here = at[None, :] + split
        inside = split < used
        own = tl.load(splits.peaks + here, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(splits.totals + here, mask=inside, other=0.0, cache_modifier=".cg")
        inside = inside[:, :, None] & (d < D)
        rows = splits.sums + here[:, :, None] * D + d
        parts = tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(own, 0))
        weights = tl.exp2(own - new_peak[None, :])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights * sums, 0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        peak = new_peak
    total = _with_sinks(total, peak, sinks, head)
    return acc / total[:, None]


@triton.jit
def _enter(pages, at, stores, scale, cos, sin, token, LAYOUT: tl.constexpr):
    """Rotate the new token and store it in page row ``at [1]`` if it ``stores [1]``.

    Return its queries in the matmul type. Key and value have the cache's precision.
    """
    k = token.k * cos[None, :] + token.k_other * sin[None, :]
    k = store_rows(pages, k, at, stores, 1, LAYOUT)
    v = store_rows(pages, token.v, at + LAYOUT.G * LAYOUT.L, stores, 1, LAYOUT)
    work: tl.constexpr = tl.bfloat16 if LAYOUT.BFP8 else pages.data.dtype.element_ty
    turned = (token.q * cos[None, :] + token.q_other * sin[None, :]).to(work)
    return _Query(turned, tl.sum(turned.to(tl.float32) * k, 1) * scale, v, scale)


@triton.jit
def _start_split(query, is_last, R: tl.constexpr, E: tl.constexpr):
    """Return a split's softmax before its pages: the new token in the last split, else empty."""
    peak = tl.where(is_last, query.own_score, float("-inf"))
    total = tl.where(is_last, tl.full([R], 1.0, tl.float32), 0.0)
    return Softmax(peak, total, tl.where(is_last, query.v, tl.zeros([R, E], tl.float32)))


@triton.jit
def _attend_splits(
    cache,
    query,
    splits,
    group,
    output,
    scratch,
    k,
    v,
    REPEAT: tl.constexpr,
    WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute this program's splits. The caller has loaded the first page.

    Each page is loaded during the work on its predecessor. The new token starts the softmax of the
    last split.
    """
    D: tl.constexpr = LAYOUT.D
    E: tl.constexpr = LAYOUT.E
    stride, r = tl.num_programs(2), tl.arange(0, query.q.shape[0])
    at, is_real = group.first_split + r * group.num_splits, r < REPEAT
    for split in range(tl.program_id(2), splits.count, stride):
        softmax = _start_split(query, split == splits.count - 1, query.q.shape[0], E)
        start = splits.first + split * splits.size
        stop = tl.minimum(start + splits.size, splits.end)
        for page in range(start, stop):
            following = tl.where(page + 1 < stop, page + 1, start + stride * splits.size)
            k_next, v_next = _page_tiles(cache, following, following < splits.end, WINDOW, LAYOUT)
            softmax = _add_page(softmax, query, k, v, page, cache.position, WINDOW, LAYOUT, CHAINED)
            k, v = k_next, v_next
        if splits.count == 1:
            head = group.first_head + tl.minimum(r, REPEAT - 1)
            total = _with_sinks(softmax.total, softmax.peak, output.sinks, head)
            result = (softmax.sums / total[:, None]).to(output.ptr.dtype.element_ty)
            _store_heads(output.ptr, result, is_real, D, E)
        else:
            store_split(scratch, softmax, at + split, is_real, D, E)


@triton.jit
def _finish(
    output,
    scratch,
    arrived,
    group,
    used,
    REPEAT: tl.constexpr,
    R: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Combine a head's splits in the last program to arrive."""
    # All stores of this program must precede its arrival.
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == tl.minimum(used, tl.num_programs(2)) - 1:
        tl.store(arrived, 0)
        r = tl.arange(0, R)
        at = group.first_split + tl.minimum(r, REPEAT - 1) * group.num_splits
        head = group.first_head + tl.minimum(r, REPEAT - 1)
        result = _combine(scratch, at, used, output.sinks, head, R, LAYOUT.D, LAYOUT.E)
        result = result.to(output.ptr.dtype.element_ty)
        _store_heads(output.ptr, result, r < REPEAT, LAYOUT.D, LAYOUT.E)


@triton.jit
def _new_token(token, g, partner, H: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """Load the heads of ``g`` and its key with their partner channels, and its value."""
    G: tl.constexpr = LAYOUT.G
    q, q_other = _heads(token, g * (H // G), H // G, partner, ROWS, LAYOUT.D)
    k, k_other = _heads(token, H + g, 1, partner, 1, LAYOUT.D)
    v, _ = _heads(token, H + G + g, 1, partner, 1, LAYOUT.D)
    return _NewToken(q, q_other, k, k_other, v)


@triton.jit
def _new_offset(cache, splits, LAYOUT: tl.constexpr):
    """Return the new token's page row ``[1]``, and whether this program stores it ``[1]``."""
    G: tl.constexpr = LAYOUT.G
    L: tl.constexpr = LAYOUT.L
    newest = tl.load(cache.table + tl.maximum(cache.position, 0) // L).to(tl.int64)
    at = tl.full([1], 0, tl.int64) + (newest * 2 * G + cache.g) * L + cache.position % L
    rest = (splits.count - 1 - tl.program_id(2)) % tl.num_programs(2)
    return at, tl.full([1], rest, tl.int32) == 0


@triton.jit
def _attend_decode_kernel(
    qkv,
    out,
    positions,
    slots,
    inv_freq,
    partial,
    peaks,
    totals,
    arrived,
    scale,
    num_splits,
    out_stride,
    qkv_stride,
    sinks,
    values,
    exponents,
    tables,
    table_width,
    H: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (b, g, z) computes heads of g in row b, for the splits z, z + Z, ... of Z."""
    release_dependents(CHAINED)
    REPEAT: tl.constexpr = H // LAYOUT.G
    ROWS: tl.constexpr = 16 if R < 16 else R
    b, g, z = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    frequencies, partner, second = load_rotation(inv_freq, HALF, LAYOUT.E, INTERLEAVED)
    if not EARLY:
        wait_for_inputs(CHAINED)
    position = tl.load(positions + b).to(tl.int32)
    table = tables + tl.load(slots + b) * table_width
    splits = _plan(position, num_splits, WINDOW, LAYOUT.L)
    cache = _RowCache(PagePointers(values, exponents), table, position, g)
    k, v = _page_tiles(cache, splits.first + z * splits.size, z < splits.count, WINDOW, LAYOUT)
    at, stores = _new_offset(cache, splits, LAYOUT)
    cos, sin = turn_of(position, frequencies, second)
    if EARLY:
        wait_for_inputs(CHAINED)
    token = _new_token(qkv + b * qkv_stride, g, partner, H, ROWS, LAYOUT)
    output = _HeadOutput(out + (b * out_stride + g * REPEAT * LAYOUT.D), sinks)
    scratch = SplitPointers(peaks, totals, partial)
    group = _HeadGroup(g * REPEAT, (b * H + g * REPEAT) * num_splits, num_splits)
    if z < splits.count:
        query = _enter(cache.pages, at, stores, scale, cos, sin, token, LAYOUT)
        _attend_splits(
            cache, query, splits, group, output, scratch, k, v, REPEAT, WINDOW, LAYOUT, CHAINED
        )
        if arrived is not None and splits.count > 1:
            _finish(
                output, scratch, arrived + b * LAYOUT.G + g, group, splits.count, REPEAT, R, LAYOUT
            )
    elif z == 0:
        _store_heads(output.ptr, 0.0, tl.arange(0, ROWS) < REPEAT, LAYOUT.D, LAYOUT.E)


@triton.jit
def _combine_kernel(
    out,
    positions,
    partial,
    peaks,
    totals,
    sinks,
    num_splits,
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    L: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (b, h) combines the splits of a head, if it has several."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + b).to(tl.int32)
    used = _plan(position, num_splits, WINDOW, L).count
    if used > 1:
        split, d = tl.arange(0, SPLITS), tl.arange(0, E)
        at, inside = (b * H + head) * num_splits + split, split < used
        own = tl.load(peaks + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(totals + at, mask=inside, other=0.0, cache_modifier=".cg")
        here = inside[:, None] & (d < D)[None, :]
        rows = partial + at[:, None] * D + d[None, :]
        parts = tl.load(rows, mask=here, other=0.0, cache_modifier=".cg")
        peak = tl.max(own, 0)
        weights = tl.exp2(own - peak)
        total = _with_sinks(tl.sum(weights * sums, 0), peak, sinks, head)
        result = tl.sum(weights[:, None] * parts, 0) / total
        target = out + b * out_stride + head * D + d
        tl.store(target, result.to(out.dtype.element_ty), mask=d < D)


def attend_decode(
    pages: KVPages,
    qkv: torch.Tensor,
    *,
    out: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    inv_freq: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int = 0,
    interleaved: bool = False,
    scratch: DecodeScratch,
    early: bool = False,
    sinks: torch.Tensor | None = None,
    is_fast: bool = False,
) -> None:
    """Rotate ``qkv``, store its keys and values, and attend to the cache.

    The arithmetic is bf16 with fp32 sums and softmax, or fp32 with fp32 pages. A row at a negative
    position is padding: it is not stored and its output is zeros. See
    :func:`ops.attention.rope_attention_step` for the remaining arguments.

    Args:
        qkv: ``[B, (H + 2 G) D]`` with any row stride.
        out: ``[B, H D]`` with any row stride.
        positions, slots: int64 ``[B]``. Slots must be distinct.
        block_tables: Page tables, int32 ``[S, M]``.
        early: Positions, slots, tables and earlier pages were written before the first kernel of
            this chain, as in a captured step. They are read before the previous kernel ends.
        sinks: A further score per head, float32 ``[H]``. None: none.
        is_fast: Give each program a single split. Then bits depend on the batch size.
    """
    assert qkv.stride(1) == 1 and out.stride(1) == 1
    assert inv_freq.dtype == torch.float32 and 2 * inv_freq.shape[0] <= pages.head_dim
    num_splits, programs, num_warps = _launch_of(pages, len(qkv), block_tables, is_fast=is_fast)
    scratch.check(len(qkv) * num_heads * num_splits, pages.head_dim)
    arrived = scratch.arrived if num_splits <= MAX_TOGETHER else None
    _attend_decode_kernel[(len(qkv), pages.num_kv_heads, programs)](
        qkv,
        out,
        positions,
        slots,
        inv_freq,
        *scratch.buffers[:3],
        arrived,
        *(scale * LOG2_E, num_splits, out.stride(0), qkv.stride(0), sinks),
        **page_arguments(pages, block_tables),
        H=num_heads,
        R=block_of(num_heads // pages.num_kv_heads, minimum=1),
        HALF=inv_freq.shape[0],
        WINDOW=window,
        INTERLEAVED=interleaved,
        EARLY=early,
        num_warps=num_warps,
        **chained(qkv),
    )
    if arrived is None:
        _combine_splits(out, positions, scratch, sinks, num_splits, num_heads, window, pages)


def _combine_splits(
    out: torch.Tensor,
    positions: torch.Tensor,
    scratch: DecodeScratch,
    sinks: torch.Tensor | None,
    num_splits: int,
    num_heads: int,
    window: int,
    pages: KVPages,
) -> None:
    _combine_kernel[(len(out), num_heads)](
        out,
        positions,
        *scratch.buffers[:3],
        sinks,
        num_splits,
        out.stride(0),
        H=num_heads,
        D=pages.head_dim,
        E=block_of(pages.head_dim),
        SPLITS=block_of(num_splits),
        WINDOW=window,
        L=PAGE,
        **chained(out),
    )


def _launch_of(
    pages: KVPages, num_rows: int, block_tables: torch.Tensor, *, is_fast: bool
) -> tuple[int, int, int]:
    """Return the splits and programs of a row and key/value head, and the warps of a program."""
    num_splits = min(MAX_SPLITS, block_tables.shape[1])
    programs = max(1, PROGRAMS // (num_rows * pages.num_kv_heads))
    programs = min(num_splits, 1 << programs.bit_length() - 1)
    # The tiles of two pages are in registers at a time.
    num_warps = 4 if pages.head_dim <= 128 and pages.values.dtype != torch.float32 else 8
    return programs if is_fast else num_splits, programs, num_warps
