"""Rotary embedding for a prompt's queries and keys, and the write to the cache pages.

Shape letters: T tokens, H query heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    PagePointers,
    channel_partners,
    load_rotation,
    page_arguments,
    store_rows,
    turn_of,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.state.pages import KVPages
from tilewright.compiler.targets.cuda.tuning import tuning

HEADS = 8
"""Heads in a tile. A program computes a tile, or all tiles of a token."""

MAX_TILED_TOKENS: int = tuning()["attention"]["rope_few_tokens"]
"""Maximum prompt length with a program for each tile.

In longer prompts, a program computes all heads of a token and its angles once. These prompts also
use a library for attention, so one run of a long prompt compiles all kernels that long prompts
need.
"""


class _Token(NamedTuple):
    """A token in a kernel: its row in ``qkv``, index, position, and page table."""

    row: Any
    index: Any
    position: Any
    table: Any


class _Heads(NamedTuple):
    """The heads of a tile: kind (queries, keys or values), first column, heads, and mask."""

    kind: Any
    base: Any
    head: Any
    keep: Any


class _Angles(NamedTuple):
    """The channels' frequencies, and with ``WHOLE`` their cosines and signed sines."""

    frequencies: Any
    cos: Any
    sin: Any


class _Outputs(NamedTuple):
    """Rotated queries, copies of stored keys and values, and the pages."""

    q: Any
    k: Any
    v: Any
    pages: Any


@triton.jit
def _heads_of(tile, H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr):
    """Return the heads of a tile. Query tiles precede key tiles and value tiles."""
    Q_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    # First head and head count by kind: queries, keys, values.
    kind = tl.where(tile < Q_TILES, 0, tl.where(tile < Q_TILES + KV_TILES, 1, 2))
    base = tl.where(kind == 0, 0, tl.where(kind == 1, H, H + G))
    limit = tl.where(kind == 0, H, G)
    before = tl.where(kind == 0, 0, tl.where(kind == 1, Q_TILES, Q_TILES + KV_TILES))
    head = (tile - before) * HEADS + tl.arange(0, HEADS)
    return _Heads(kind, base, head, head < limit)


@triton.jit
def _store_kv(
    x,
    here,
    inside,
    token,
    heads,
    outputs,
    HEADS: tl.constexpr,
    LAYOUT: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Store keys or values of a token in its page, and with ``COPIES`` in an output ``here``."""
    G: tl.constexpr = LAYOUT.G
    L: tl.constexpr = LAYOUT.L
    position, real = token.position, token.position >= 0
    page = tl.load(token.table + position // L, mask=real, other=0)
    rows = ((page.to(tl.int64) * 2 + heads.kind - 1) * G + heads.head) * L + position % L
    stored = store_rows(outputs.pages, x, rows, heads.keep & real, HEADS, LAYOUT)
    if COPIES:
        copy = tl.where(real, stored, 0.0).to(outputs.k.dtype.element_ty)
        offset = token.index * (G * LAYOUT.D)
        if heads.kind == 1:
            tl.store(outputs.k + offset + here, copy, mask=inside)
        else:
            tl.store(outputs.v + offset + here, copy, mask=inside)


@triton.jit
def _rotate_tile(
    tile,
    token,
    angles,
    outputs,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
    WHOLE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Rotate and store some heads of a token. A negative position is padding.

    With ``WHOLE``, the caller provides cosines and sines. Otherwise they are computed.
    """
    D: tl.constexpr = LAYOUT.D
    d = tl.arange(0, LAYOUT.E)
    _, partner, second = channel_partners(HALF, LAYOUT.E, INTERLEAVED)
    heads = _heads_of(tile, H, LAYOUT.G, HEADS)
    inside = heads.keep[:, None] & (d < D)[None, :]
    at = (heads.base + heads.head)[:, None] * D
    x = tl.load(token.row + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if heads.kind < 2:
        other = tl.load(token.row + at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        cos, sin = angles.cos, angles.sin
        if not WHOLE:
            cos, sin = turn_of(token.position, angles.frequencies, second)
        x = x * cos[None, :] + other * sin[None, :]
    x = tl.where(token.position >= 0, x, 0.0)
    here = heads.head[:, None] * D + d[None, :]
    if heads.kind == 0:
        rotated = x.to(outputs.q.dtype.element_ty)
        tl.store(outputs.q + token.index * (H * D) + here, rotated, mask=inside)
    else:
        _store_kv(x, here, inside, token, heads, outputs, HEADS, LAYOUT, COPIES)


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    q_out,
    k_out,
    v_out,
    positions,
    slots,
    inv_freq,
    qkv_stride,
    values,
    exponents,
    tables,
    table_width,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
    WHOLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (t, i) computes tile i of token t. With ``WHOLE``, program (t, 0) computes all
    tiles.
    """
    release_dependents(CHAINED)
    at = tl.program_id(0).to(tl.int64)
    frequencies, _, second = load_rotation(inv_freq, HALF, LAYOUT.E, INTERLEAVED)
    wait_for_inputs(CHAINED)
    position, slot = tl.load(positions + at), tl.load(slots + at)
    token = _Token(qkv + at * qkv_stride, at, position, tables + slot * table_width)
    outputs = _Outputs(q_out, k_out, v_out, PagePointers(values, exponents))
    cos, sin = frequencies, frequencies
    if WHOLE:
        cos, sin = turn_of(position, frequencies, second)
    angles = _Angles(frequencies, cos, sin)
    num_tiles: tl.constexpr = (H + HEADS - 1) // HEADS + 2 * ((LAYOUT.G + HEADS - 1) // HEADS)
    for index in tl.static_range(num_tiles if WHOLE else 1):
        tile = index if WHOLE else tl.program_id(1)
        _rotate_tile(
            tile, token, angles, outputs, H, HALF, HEADS, INTERLEAVED, COPIES, WHOLE, LAYOUT
        )


def rotate_and_store(
    pages: KVPages,
    qkv: torch.Tensor,
    *,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    inv_freq: torch.Tensor,
    num_heads: int,
    interleaved: bool = False,
) -> None:
    """Rotate the queries and keys of a prompt, and store its keys and values in the pages.

    Tokens at negative positions are padding: they are not stored, and their outputs are zeros.

    Args:
        qkv: ``[T, (H + 2 G) D]`` with any row stride.
        q_out: Rotated queries ``[T, H, D]``.
        k_out, v_out: Copies ``[T, G, D]`` of the stored keys and values, both or none, in one type.
        positions, slots: int64 ``[T]``.
        block_tables: Page tables, int32 ``[S, M]``.
        inv_freq: fp32 ``[R]``. The first 2 R channels are rotated.
        interleaved: Pairs are neighbors. False: pairs are (i, i + R).
    """
    assert qkv.stride(1) == 1 and q_out.is_contiguous() and (k_out is None) == (v_out is None)
    assert inv_freq.dtype == torch.float32 and 2 * inv_freq.shape[0] <= pages.head_dim
    assert all(copy is None or copy.is_contiguous() for copy in (k_out, v_out))
    num_tiles = cdiv(num_heads, HEADS) + 2 * cdiv(pages.num_kv_heads, HEADS)
    num_tokens, is_whole = len(qkv), len(qkv) > MAX_TILED_TOKENS
    _rotate_and_store_kernel[(num_tokens, 1 if is_whole else num_tiles)](
        qkv,
        q_out,
        q_out if k_out is None else k_out,
        q_out if v_out is None else v_out,
        positions,
        slots,
        inv_freq,
        qkv.stride(0),
        **page_arguments(pages, block_tables),
        H=num_heads,
        HALF=inv_freq.shape[0],
        HEADS=HEADS,
        INTERLEAVED=interleaved,
        COPIES=k_out is not None,
        WHOLE=is_whole,
        num_warps=4,
        **chained(qkv),
    )
