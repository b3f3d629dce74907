"""Prefill attention: new tokens of one sequence attend to its pages, which have their keys and
values.

Shape letters: T tokens, H query heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    load_tile,
    page_arguments,
    product,
    tile_values,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    LOG2_E,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages
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


@triton.jit
def _add_pages(
    peak,
    total,
    acc,
    q,
    position,
    last,
    first,
    stop,
    newest,
    oldest,
    values,
    exponents,
    table,
    g,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    BFP8: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add the pages ``first .. stop`` to the online softmax (base 2) of ``q [R, E]``.

    ``MASKED``: hide keys after a row's ``last`` position or before its window. Keys before
    ``oldest`` or after ``newest`` are not read.
    """
    for page in range(first, stop):
        number = tl.load(table + page).to(tl.int64)
        row = (number * 2 * G + g) * L
        at = page * L + tl.arange(0, L)
        valid = tl.full([L], True, tl.int1)
        if MASKED:
            valid = (at <= newest) & (at >= oldest)
        k, k_shared = load_tile(values, exponents, row, valid, L, D, E, BFP8)
        keys = tile_values(k, k_shared, L, E, BFP8, CHAINED)
        start = tl.zeros([q.shape[0], L], tl.float32)
        scores = product(q, tl.trans(keys), start, CHAINED) * scale
        if MASKED:
            seen = at[None, :] <= last[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, HIDDEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        v, v_shared = load_tile(values, exponents, row + G * L, valid, L, D, E, BFP8)
        vals = tile_values(v, v_shared, L, E, BFP8, CHAINED)
        acc = product(weights.to(vals.dtype), vals, acc * fade[:, None], CHAINED)
        peak = new_peak
    return peak, total, acc


@triton.jit
def _attend_pages(
    rows,
    position,
    last,
    first,
    stop,
    lowest,
    newest,
    oldest,
    values,
    exponents,
    table,
    g,
    scale,
    WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    BFP8: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return the online softmax of ``rows [R, E]`` over the pages ``first .. stop``.

    The rows have positions from ``lowest``, and see keys up to ``newest``. The page range may be
    empty.
    """
    peak, total = tl.full([R], HIDDEN, tl.float32), tl.zeros([R], tl.float32)
    acc = tl.zeros([R, E], tl.float32)
    # Pages first .. begin and full .. stop have keys hidden from some row.
    begin = first
    full = tl.minimum(tl.maximum((lowest + 1) // L, first), stop)
    if WINDOW > 0:
        begin = tl.minimum(tl.maximum(newest - WINDOW + L, 0) // L, stop)
        full = tl.maximum(full, begin)
        peak, total, acc = _add_pages(
            peak, total, acc, rows, position, last, first, begin, newest, oldest, values, exponents,
            table, g, scale, True, WINDOW, G, D, E, L, BFP8, CHAINED,
        )  # fmt: skip
    peak, total, acc = _add_pages(
        peak, total, acc, rows, position, last, begin, full, newest, oldest, values, exponents,
        table, g, scale, False, WINDOW, G, D, E, L, BFP8, CHAINED,
    )  # fmt: skip
    return _add_pages(
        peak, total, acc, rows, position, last, full, stop, newest, oldest, values, exponents,
        table, g, scale, True, WINDOW, G, D, E, L, BFP8, CHAINED,
    )  # fmt: skip


@triton.jit
def _share(
    peak,
    total,
    acc,
    used,
    partial,
    peaks,
    totals,
    arrived,
    place,
    R: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store a split of block ``place``. In the last split to arrive, combine all splits in order.

    Return total, sums, and whether this split is the last.
    """
    split = tl.program_id(2)
    r, d = tl.arange(0, R), tl.arange(0, E)[None, :]
    first = place.to(tl.int64) * SPLITS
    at = (first + split) * R + r
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)
    tl.store(partial + at[:, None] * D + d, acc, mask=d < D)
    # All stores of this program must precede its arrival.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu") == used - 1
    if is_last:
        tl.store(arrived + place, 0)
        peak, total = tl.full([R], HIDDEN, tl.float32), tl.zeros([R], tl.float32)
        acc = tl.zeros([R, E], tl.float32)
        for other in range(used):
            at = (first + other) * R + r
            its = tl.load(peaks + at)
            new_peak = tl.maximum(peak, its)
            fade, its_fade = tl.exp2(peak - new_peak), tl.exp2(its - new_peak)
            total = total * fade + tl.load(totals + at) * its_fade
            its_acc = tl.load(partial + at[:, None] * D + d, mask=d < D, other=0.0)
            acc = acc * fade[:, None] + its_acc * its_fade[:, None]
            peak = new_peak
    return peak, total, acc, is_last


# specialization would compile some lengths at their first use
@triton.jit(do_not_specialize=["num_tokens"])
def _attend_prefill_kernel(
    q, out, positions, slots, num_tokens, out_stride, scale, sinks, partial, peaks, totals,
    arrived, values, exponents, tables, table_width,
    SPLITS: tl.constexpr, SPLIT_PAGES: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    WINDOW: tl.constexpr, BFP8: tl.constexpr, CHAINED: tl.constexpr, ENDS: tl.constexpr = False,
):  # fmt: skip
    """Program (i, h, s) computes R tokens, head h and part s of the context.

    Program 0 has the last tokens, which take longest. With ``ENDS``, the ends of all rows follow
    their positions.
    """
    release_dependents(CHAINED)
    h = tl.program_id(1)
    g = h // (H // G)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    token, d = block.to(tl.int64) * R + tl.arange(0, R), tl.arange(0, E)[None, :]
    inside = (token < num_tokens)[:, None] & (d < D)
    here = token[:, None] * (H * D) + h * D + d
    wait_for_inputs(CHAINED)
    position = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int32)
    table = tables + tl.load(slots + block.to(tl.int64) * R) * table_width
    work: tl.constexpr = tl.bfloat16 if BFP8 else values.dtype.element_ty
    rows = tl.load(q + here, mask=inside & (position >= 0)[:, None], other=0.0).to(work)
    last = position
    if ENDS:
        end = tl.load(positions + num_tokens + token, mask=token < num_tokens, other=0)
        last = end.to(tl.int32) - 1
    newest = tl.max(last, 0)
    # Positions are consecutive: the block's first position, and the oldest position of its
    # windows.
    lowest = tl.load(positions + block.to(tl.int64) * R).to(tl.int32)
    oldest = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW > 0 else 0
    used, is_last = tl.full([], 1, tl.int32), tl.program_id(2) == 0
    first, stop = oldest // L, tl.where(newest >= 0, newest // L + 1, oldest // L)
    if SPLITS > 1:
        count = tl.maximum(tl.cdiv(stop, SPLITS), SPLIT_PAGES)
        used = tl.maximum(tl.cdiv(stop, count), 1)
        first = tl.program_id(2) * count
        stop = tl.minimum(first + count, stop)
    peak, total, acc = _attend_pages(
        rows, position, last, first, stop, lowest, newest, oldest, values, exponents, table, g,
        scale, WINDOW, G, D, E, R, L, BFP8, CHAINED,
    )  # fmt: skip
    if SPLITS > 1:  # noqa: SIM102 (a constant, and a branch)
        if (used > 1) & (tl.program_id(2) < used):
            peak, total, acc, is_last = _share(
                peak, total, acc, used, partial, peaks, totals, arrived, block * H + h,
                R, D, E, SPLITS,
            )  # fmt: skip
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + h) * 1.4426950408889634 - peak)
    total = tl.where(position >= 0, total, float("inf"))
    result = tl.where((position >= 0)[:, None], acc / total[:, None], 0.0)
    out += token[:, None] * out_stride + h * D + d
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
        scratch: Buffers for long context splits. None: no splits. Sliding windows have no
            splits.
        sinks: A further score per head, float32 ``[H]``. None: none.
        ends: Position after the last visible position, int64 ``[T]``, ascending. None: causal.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.is_contiguous() and out.stride(1) == 1 and pages.head_dim == head_dim
    assert slots.shape == positions.shape == (num_tokens,)
    tokens = min(num_tokens, _MAX_SMALL_M if block == 64 else num_tokens)
    rows, num_warps, num_stages = _tile(tokens, head_dim, pages.values.itemsize == 4)
    assert block % rows == 0
    shares = scratch is not None and not window and num_tokens <= SPLIT_TOKENS
    splits = SPLITS if shares and rows == _SPLIT_ROWS else 1
    more: dict[str, bool] = {}
    if ends is not None:
        positions, more = torch.cat((positions, ends)), {"ENDS": True}
    left = (
        (scratch.partial, scratch.peaks, scratch.totals, scratch.arrived) if scratch else (q,) * 4
    )
    _attend_prefill_kernel[(triton.cdiv(num_tokens, rows), num_heads, splits)](
        q, out, positions, slots, num_tokens, out.stride(0), scale * LOG2_E, sinks, *left,
        **page_arguments(pages, block_tables), SPLITS=splits, SPLIT_PAGES=SPLIT_PAGES,
        H=num_heads, R=rows, L=PAGE, WINDOW=window,
        num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=_FUSES, **chained(q), **more,
    )  # fmt: skip


def _tile(num_tokens: int, head_dim: int, is_fp32: bool) -> tuple[int, int, int]:
    """Return the tokens in a program, its warps, and its pipeline stages."""
    if is_fp32:
        tile = _TUNING["tiles"]["fp32"]
    else:
        tiles = _TUNING["tiles"]["wide" if head_dim > 128 else "usual"]
        tile = tiles["few" if num_tokens <= _MAX_SMALL_M else "many"]
    rows, num_warps, num_stages = tile
    return rows, num_warps, num_stages
