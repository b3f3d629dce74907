"""Decode attention over the paged cache, with rotation and the cache write.

A row's result depends on its position and table width only: the splits of its pages do not depend
on the batch size and are combined in order. Shape letters: B rows, H query heads, G key/value
heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    channel_partners,
    load_tile,
    page_arguments,
    product,
    store_rows,
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


@triton.jit
def _plan(position, num_splits, WINDOW: tl.constexpr, L: tl.constexpr):
    """Return first page, end page, pages in a split, and split count. Padding has no
    splits.
    """
    last = tl.maximum(position, 0)
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // L
    end = last // L + 1
    each = tl.cdiv(end - first, num_splits)
    used = tl.where(position < 0, 0, tl.cdiv(end - first, each))
    return first, end, each, used


@triton.jit
def _page_tiles(
    values,
    exponents,
    table,
    page,
    position,
    g,
    wanted,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    BFP8: tl.constexpr,
):
    """Load a page's keys and values without decoding, if it is ``wanted``."""
    number = tl.load(table + page, mask=wanted, other=0).to(tl.int64)
    at = page * L + tl.arange(0, L)
    valid = (at < position) & wanted
    if WINDOW > 0:
        valid = valid & (at > position - WINDOW)
    offset = (number * 2 * G + g) * L
    k, k_shared = load_tile(values, exponents, offset, valid, L, D, E, BFP8)
    v, v_shared = load_tile(values, exponents, offset + G * L, valid, L, D, E, BFP8)
    return k, k_shared, v, v_shared


@triton.jit
def _add_page(
    peak,
    total,
    acc,
    q,
    k,
    v,
    page,
    position,
    scale,
    WINDOW: tl.constexpr,
    L: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add a page's positions to the online softmax (base 2) of ``q [R, E]``."""
    at = page * L + tl.arange(0, L)
    valid = at < position
    if WINDOW > 0:
        valid = valid & (at > position - WINDOW)
    scores = product(q, tl.trans(k), tl.zeros([q.shape[0], L], tl.float32), CHAINED) * scale
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, 1)
    acc = product(weights.to(v.dtype), v, acc * fade[:, None], CHAINED)
    return new_peak, total, acc


@triton.jit
def _with_sinks(total, peak, sinks, head):
    """Add the sink's weight to the sum of weights of each ``head [R]``."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - peak)
    return total


@triton.jit
def _combine(
    partial,
    peaks,
    totals,
    at,
    used,
    sinks,
    head,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Return the combined splits ``[R, E]`` of R heads, in order.

    ``at [R]`` is each head's first split. Loads bypass the L1 cache because peer programs
    wrote the data.
    """
    CHUNK: tl.constexpr = max(1, 8192 // (R * E))
    d = tl.arange(0, E)[None, None, :]
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, E], tl.float32)
    for start in range(0, used, CHUNK):
        split = start + tl.arange(0, CHUNK)[:, None]
        here = at[None, :] + split
        own = tl.load(peaks + here, mask=split < used, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(totals + here, mask=split < used, other=0.0, cache_modifier=".cg")
        inside = (split < used)[:, :, None] & (d < D)
        rows = partial + here[:, :, None] * D + d
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
def _enter(
    values,
    exponents,
    row,
    stores,
    scale,
    cos,
    sin,
    q,
    q_other,
    k,
    k_other,
    v,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    BFP8: tl.constexpr,
):
    """Rotate the new token and store it in page at ``row [1]`` if it ``stores [1]``.

    Return q ``[R, E]`` in the matmul type, the scores with the token's own key, and its value. Key
    and value have the cache's precision.
    """
    k = k * cos[None, :] + k_other * sin[None, :]
    k = store_rows(values, exponents, k, row, stores, 1, D, E, BFP8)
    v = store_rows(values, exponents, v, row + G * L, stores, 1, D, E, BFP8)
    work: tl.constexpr = tl.bfloat16 if BFP8 else values.dtype.element_ty
    turned = (q * cos[None, :] + q_other * sin[None, :]).to(work)
    return turned, tl.sum(turned.to(tl.float32) * k, 1) * scale, v


@triton.jit
def _attend_splits(
    values, exponents, table, position, g, q, own_score, v_new, scale, first, end, each, used,
    sinks, head, out, partial, peaks, totals, at, keep, k, k_shared, v, v_shared,
    WINDOW: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, BFP8: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute this program's splits. The caller has loaded the first page.

    Each page is loaded during the work on its predecessor. The new token starts the softmax of the
    last split.
    """
    stride = tl.num_programs(2)
    r = tl.arange(0, R)
    d = tl.arange(0, E)[None, :]
    for split in range(tl.program_id(2), used, stride):
        newest = split == used - 1
        peak = tl.where(newest, own_score, float("-inf"))
        total = tl.where(newest, tl.full([R], 1.0, tl.float32), 0.0)
        acc = tl.where(newest, v_new, tl.zeros([R, E], tl.float32))
        start = first + split * each
        stop = tl.minimum(start + each, end)
        for page in range(start, stop):
            following = tl.where(page + 1 < stop, page + 1, start + stride * each)
            k_next, k_shared_next, v_next, v_shared_next = _page_tiles(
                values,
                exponents,
                table,
                following,
                position,
                g,
                following < end,
                WINDOW,
                G,
                D,
                E,
                L,
                BFP8,
            )
            keys = tile_values(k, k_shared, L, E, BFP8, CHAINED)
            vals = tile_values(v, v_shared, L, E, BFP8, CHAINED)
            peak, total, acc = _add_page(
                peak, total, acc, q, keys, vals, page, position, scale, WINDOW, L, CHAINED
            )
            k, k_shared, v, v_shared = k_next, k_shared_next, v_next, v_shared_next
        if used == 1:
            total = _with_sinks(total, peak, sinks, head)
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + r[:, None] * D + d, result, mask=keep[:, None] & (d < D))
        else:
            tl.store(peaks + at + split, peak, mask=keep)
            tl.store(totals + at + split, total, mask=keep)
            tl.store(partial + (at + split)[:, None] * D + d, acc, mask=keep[:, None] & (d < D))


@triton.jit
def _finish(
    out,
    partial,
    peaks,
    totals,
    arrived,
    first_split,
    num_splits,
    used,
    sinks,
    first_head,
    REPEAT: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Combine a head's splits in the last program to arrive."""
    # All stores of this program must precede its arrival.
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    if before == tl.minimum(used, tl.num_programs(2)) - 1:
        tl.store(arrived, 0)
        r = tl.arange(0, R)
        at = first_split + tl.minimum(r, REPEAT - 1) * num_splits
        d = tl.arange(0, E)[None, :]
        head = first_head + tl.minimum(r, REPEAT - 1)
        result = _combine(partial, peaks, totals, at, used, sinks, head, R, D, E)
        result = result.to(out.dtype.element_ty)
        tl.store(out + r[:, None] * D + d, result, mask=(r < REPEAT)[:, None] & (d < D))


@triton.jit
def _new_token(
    token, g, partner, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    """Load the heads of ``g`` and its key with their partner channels, and its value."""
    q, q_other = _heads(token, g * (H // G), H // G, partner, ROWS, D)
    k, k_other = _heads(token, H + g, 1, partner, 1, D)
    v, _ = _heads(token, H + G + g, 1, partner, 1, D)
    return q, q_other, k, k_other, v


@triton.jit
def _attend_decode_kernel(
    qkv, out, positions, slots, inv_freq, partial, peaks, totals, arrived,
    scale, num_splits, out_stride, qkv_stride, sinks, values, exponents, tables, table_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    HALF: tl.constexpr, L: tl.constexpr, WINDOW: tl.constexpr, INTERLEAVED: tl.constexpr,
    BFP8: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (b, g, z) computes heads of g in row b, for the splits z, z + Z, ... of Z."""
    release_dependents(CHAINED)
    REPEAT: tl.constexpr = H // G
    ROWS: tl.constexpr = 16 if R < 16 else R
    b, g, z = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    frequency, partner, second = channel_partners(HALF, E, INTERLEAVED)
    frequencies = tl.load(inv_freq + frequency, mask=tl.arange(0, E) < 2 * HALF, other=0.0)
    if not EARLY:
        wait_for_inputs(CHAINED)
    position = tl.load(positions + b).to(tl.int32)
    table = tables + tl.load(slots + b) * table_width
    first, end, each, used = _plan(position, num_splits, WINDOW, L)
    k, k_shared, v, v_shared = _page_tiles(
        values,
        exponents,
        table,
        first + z * each,
        position,
        g,
        z < used,
        WINDOW,
        G,
        D,
        E,
        L,
        BFP8,
    )
    newest = tl.load(table + tl.maximum(position, 0) // L).to(tl.int64)
    row = tl.full([1], 0, tl.int64) + (newest * 2 * G + g) * L + position % L
    stores = tl.full([1], (used - 1 - z) % tl.num_programs(2), tl.int32) == 0
    cos, sin = turn_of(position, frequencies, second)
    if EARLY:
        wait_for_inputs(CHAINED)
    q, q_other, k_new, k_other, v_new = _new_token(qkv + b * qkv_stride, g, partner, H, G, D, ROWS)
    out += b * out_stride + g * REPEAT * D
    first_split, r = (b * H + g * REPEAT) * num_splits, tl.arange(0, ROWS)
    head = g * REPEAT + tl.minimum(r, REPEAT - 1)
    if z < used:
        turned, own_score, v_new = _enter(
            values, exponents, row, stores, scale, cos, sin, q, q_other, k_new, k_other, v_new,
            G, D, E, L, BFP8)  # fmt: skip
        _attend_splits(
            values, exponents, table, position, g, turned, own_score, v_new, scale, first, end,
            each, used, sinks, head, out, partial, peaks, totals, first_split + r * num_splits,
            r < REPEAT, k, k_shared, v, v_shared, WINDOW, G, D, E, ROWS, L, BFP8, CHAINED,
        )  # fmt: skip
        if used > 1:
            _finish(
                out, partial, peaks, totals, arrived + b * G + g, first_split, num_splits, used,
                sinks, g * REPEAT, REPEAT, R, D, E)  # fmt: skip
    elif z == 0:
        d = tl.arange(0, E)[None, :]
        tl.store(out + r[:, None] * D + d, 0.0, mask=(r < REPEAT)[:, None] & (d < D))


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
    """
    num_rows, num_pages = qkv.shape[0], block_tables.shape[1]
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    num_splits = min(MAX_SPLITS, num_pages)
    assert qkv.stride(1) == 1 and out.stride(1) == 1
    assert inv_freq.dtype == torch.float32 and 2 * inv_freq.shape[0] <= head_dim
    assert scratch.partial.numel() >= num_rows * num_heads * num_splits * head_dim
    assert scratch.peaks.numel() >= num_rows * num_heads * num_splits
    programs = max(1, PROGRAMS // (num_rows * num_kv_heads))
    programs = min(num_splits, 1 << programs.bit_length() - 1)
    # The tiles of two pages are in registers at a time.
    num_warps = 4 if head_dim <= 128 and pages.values.dtype != torch.float32 else 8
    _attend_decode_kernel[(num_rows, num_kv_heads, programs)](
        qkv, out, positions, slots, inv_freq, scratch.partial, scratch.peaks, scratch.totals,
        scratch.arrived, scale * LOG2_E, num_splits, out.stride(0), qkv.stride(0), sinks,
        **page_arguments(pages, block_tables),
        H=num_heads, R=block_of(num_heads // num_kv_heads, least=1), HALF=inv_freq.shape[0],
        L=PAGE, WINDOW=window, INTERLEAVED=interleaved, EARLY=early,
        num_warps=num_warps, **chained(qkv),
    )  # fmt: skip
