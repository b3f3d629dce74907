"""Triton functions for the paged cache: rotation, rounding to a page, and page reads.

Shape letters: R rows in a tile, L positions in a page, D head size, E its block (a power of two).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.compiler.formats.block_float import BLOCK_SIZE
from tilewright.compiler.targets.cuda.kernels.common.launch import block_of
from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages


class PageLayout(NamedTuple):
    """The layout of pages as a compile-time argument.

    Attributes:
        G: Key/value heads.
        D: Head size.
        E: Block over a head, a power of two.
        L: Positions in a page.
        BFP8: The pages have mantissas and exponents.
    """

    G: int
    D: int
    E: int
    L: int
    BFP8: bool


class PagePointers(NamedTuple):
    """Pages in a kernel: values or mantissas, and the exponents of bfp8 pages."""

    data: Any
    exponents: Any


class Tile(NamedTuple):
    """Rows of a page before :func:`tile_values`: values ``[L, E]``, or mantissas and exponents."""

    data: Any
    exponents: Any


class Softmax(NamedTuple):
    """An online softmax in base 2: largest scores, sums of weights, and weighted sums of values."""

    peak: Any
    total: Any
    sums: Any


class SplitPointers(NamedTuple):
    """The results of splits in a kernel: those of :class:`Softmax`, by split."""

    peaks: Any
    totals: Any
    sums: Any


def page_arguments(pages: KVPages, block_tables: torch.Tensor) -> dict[str, Any]:
    """Return a kernel's page arguments.

    These are ``values`` and ``exponents`` (the values again if absent), ``tables``, the table
    width, and the layout.
    """
    assert pages.values.is_contiguous() and block_tables.is_contiguous()
    assert block_tables.dtype == torch.int32, block_tables.dtype
    bfp8 = pages.exponents is not None
    return {
        "values": pages.values,
        "exponents": pages.exponents if bfp8 else pages.values,
        "tables": block_tables,
        "table_width": block_tables.shape[1],
        "LAYOUT": PageLayout(
            pages.num_kv_heads,
            pages.head_dim,
            block_of(pages.head_dim, minimum=BLOCK_SIZE),
            PAGE,
            bfp8,
        ),
    }


@triton.jit
def cos_sin(angle):
    """Return cosine and sine of an fp32 angle, within 1e-7 for angles up to 2 ** 30.

    The reduction to an eighth of a turn is in fp64, without a slow path for large angles.
    """
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarter * 1.5707963267948966).to(tl.float32)
    square = r * r
    sin = square * (1.0 / 362880) - 1.0 / 5040
    sin = (sin * square + 1.0 / 120) * square - 1.0 / 6
    sin = r + r * square * sin
    cos = square * (1.0 / 40320) - 1.0 / 720
    cos = (cos * square + 1.0 / 24) * square - 0.5
    cos = 1.0 + square * cos
    turn = quarter.to(tl.int32) & 3
    swapped = (turn & 1) == 1
    new_cos = tl.where(swapped, sin, cos)
    new_sin = tl.where(swapped, cos, sin)
    new_cos = tl.where((turn == 1) | (turn == 2), -new_cos, new_cos)
    return new_cos, tl.where(turn >= 2, -new_sin, new_sin)


@triton.jit
def channel_partners(HALF: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return for the channels ``[E]``: frequency index, partner channel, and whether it is the
    second.

    Channels from 2 HALF are not rotated. Their partners are the channels themselves.
    """
    d = tl.arange(0, E)
    if INTERLEAVED:
        frequency = d // 2
        second = (d & 1) == 1
        partner = tl.where(second, d - 1, d + 1)
    else:
        second = d >= HALF
        frequency = tl.where(second, d - HALF, d)
        partner = tl.where(second, d - HALF, d + HALF)
    return frequency, tl.where(d < 2 * HALF, partner, d), second


@triton.jit
def load_rotation(inv_freq, HALF: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return for the channels ``[E]``: frequency, partner channel, and whether it is the second."""
    frequency, partner, second = channel_partners(HALF, E, INTERLEAVED)
    mask = tl.arange(0, E) < 2 * HALF
    return tl.load(inv_freq + frequency, mask=mask, other=0.0), partner, second


@triton.jit
def turn_of(position, frequencies, second):
    """Return cosine and signed sine ``[E]`` at a position. Frequency 0 preserves a channel."""
    cos, sin = cos_sin(position.to(tl.float32) * frequencies)
    return cos, tl.where(second, sin, -sin)


@triton.jit
def round_blocks(x, R: tl.constexpr, E: tl.constexpr):
    """Round fp32 ``[R, E]`` to bfp8.

    Return int32 mantissas ``[R, E / 16, 16]`` and exponents ``[R, E / 16, 1]``. The rounding equals
    that of the format: values are aligned to the block's largest exponent by truncation, then
    rounded to nearest even with a maximum of 127. Denormals become 0.
    """
    bits = tl.reshape(x, [R, E // 16, 16]).to(tl.int32, bitcast=True)
    own = (bits >> 23) & 0xFF
    shared = tl.max(own, 2, keep_dims=True)
    magnitudes = tl.where(own == 0, 0, (bits & 0x7FFFFF) | 0x800000)
    magnitudes = magnitudes >> tl.minimum(shared - own, 31)
    magnitudes = (magnitudes + ((magnitudes >> 17) & 1) + 0xFFFF) >> 17
    magnitudes = tl.minimum(magnitudes, 127)
    return tl.where(bits < 0, -magnitudes, magnitudes), shared


@triton.jit
def exact_values(mantissas, shared):
    """Return int32 mantissas and exponents as fp32. Denormal results become 0."""
    bits = mantissas.to(tl.float32).to(tl.int32, bitcast=True)
    offset = shared - 133
    is_zero = (mantissas == 0) | (((bits >> 23) & 0xFF) + offset < 1)
    return tl.where(is_zero, 0, bits + (offset << 23)).to(tl.float32, bitcast=True)


@triton.jit
def empty_softmax(lowest, R: tl.constexpr, E: tl.constexpr):
    """Return the softmax ``[R, E]`` of no keys. ``lowest`` is below all scores."""
    total, sums = tl.zeros([R], tl.float32), tl.zeros([R, E], tl.float32)
    return Softmax(tl.full([R], lowest, tl.float32), total, sums)


@triton.jit
def store_split(splits, softmax, at, keep, D: tl.constexpr, E: tl.constexpr):
    """Store the result of the splits ``at [R]``."""
    d = tl.arange(0, E)[None, :]
    tl.store(splits.peaks + at, softmax.peak, mask=keep)
    tl.store(splits.totals + at, softmax.total, mask=keep)
    tl.store(splits.sums + at[:, None] * D + d, softmax.sums, mask=keep[:, None] & (d < D))


@triton.jit
def store_rows(pages, x, rows, keep, R: tl.constexpr, LAYOUT: tl.constexpr):
    """Write ``x`` to page rows and return the stored values in fp32.

    Args:
        x: fp32 ``[R, E]``, 0 from channel D.
        rows: Page rows, int64 ``[R]``.
        keep: Mask ``[R]`` for the stores.
    """
    D: tl.constexpr = LAYOUT.D
    E: tl.constexpr = LAYOUT.E
    d = tl.arange(0, E)
    BLOCKS: tl.constexpr = (D + 15) // 16
    here = rows[:, None] * D + d[None, :]
    if LAYOUT.BFP8:
        mantissas, shared = round_blocks(x, R, E)
        block = tl.arange(0, E // 16)[None, :, None]
        own = (rows * BLOCKS)[:, None, None] + block
        inside = keep[:, None, None] & (block < BLOCKS)
        tl.store(pages.exponents + own, shared.to(tl.uint8), mask=inside)
        stored = tl.reshape(exact_values(mantissas, shared), [R, E])
        flat = tl.reshape(mantissas, [R, E]).to(tl.int8)
        tl.store(pages.data + here, flat, mask=keep[:, None] & (d < D)[None, :])
    else:
        rounded = x.to(pages.data.dtype.element_ty)
        tl.store(pages.data + here, rounded, mask=keep[:, None] & (d < D)[None, :])
        stored = rounded.to(tl.float32)
    return stored


@triton.jit
def load_tile(pages, row, valid, LAYOUT: tl.constexpr):
    """Load a page's rows from ``row``. Rows that are not ``valid [L]`` are zeros.

    :func:`tile_values` decodes the result: values ``[L, E]``, or mantissas ``[L, E / 16, 16]`` and
    exponents.
    """
    D: tl.constexpr = LAYOUT.D
    position = tl.arange(0, LAYOUT.L)
    if LAYOUT.BFP8:
        BLOCKS: tl.constexpr = (D + 15) // 16
        block = tl.arange(0, LAYOUT.E // 16)[None, :, None]
        d = block * 16 + tl.arange(0, 16)[None, None, :]
        inside = valid[:, None, None] & (d < D)
        here = pages.data + row * D + (position[:, None, None] * D + d)
        tile = tl.load(here, mask=inside, other=0)
        own = pages.exponents + row * BLOCKS + (position[:, None, None] * BLOCKS + block)
        shared = tl.load(own, mask=valid[:, None, None] & (block < BLOCKS), other=0)
    else:
        d = tl.arange(0, LAYOUT.E)[None, :]
        here = pages.data + row * D + (position[:, None] * D + d)
        tile = tl.load(here, mask=valid[:, None] & (d < D), other=0.0)
        shared = tl.zeros([1], tl.uint8)
    return Tile(tile, shared)


@triton.jit
def tile_values(tile, LAYOUT: tl.constexpr, CHAINED: tl.constexpr):
    """Decode the result of :func:`load_tile` to ``[L, E]`` in the pages' type, or bf16 for bfp8.

    The result is exact, except that a GPU reads blocks with an exponent below 7 (values below 2 **
    -119) as 0.
    """
    values = tile.data
    if LAYOUT.BFP8:
        shared = tile.exponents.to(tl.int32)
        if CHAINED:
            # A conversion and a bf16 multiplication. The interpreter does not support this
            # arithmetic.
            power = (tl.maximum(shared - 6, 0) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
            stored = values.to(tl.bfloat16) * power
        else:
            stored = exact_values(values.to(tl.int32), shared).to(tl.bfloat16)
        values = tl.reshape(stored, [LAYOUT.L, LAYOUT.E])
    return values


@triton.jit
def product(a, b, sums, CHAINED: tl.constexpr):
    """Return ``sums + a @ b`` in fp32.

    For Triton's interpreter, which would read bf16 operands as bits, operands are widened. Both
    methods are exact.
    """
    if not CHAINED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
