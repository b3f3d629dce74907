"""Rotary embedding for a prompt's queries and keys, and the write to the cache pages.

Shape letters: T tokens, H query heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    channel_partners,
    page_arguments,
    store_rows,
    turn_of,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages
from tilewright.compiler.targets.cuda.tuning import tuning

HEADS = 8
"""Heads in a tile. A program computes a tile, or all tiles of a token."""

MAX_TILED_TOKENS: int = tuning()["attention"]["rope_few_tokens"]
"""Maximum prompt length with a program for each tile.

In longer prompts, a program computes all heads of a token and its angles once. These prompts also
use a library for attention, so one run of a long prompt compiles all kernels that long prompts
need.
"""


@triton.jit
def _rotate_tile(
    tile, token, position, slot, frequencies, cos, sin, qkv, q_out, k_out, v_out, qkv_stride,
    values, exponents, tables, table_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    L: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, BFP8: tl.constexpr,
    COPIES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rotate and store some heads of a token. A negative position is padding.

    With ``WHOLE``, the caller provides ``cos`` and ``sin``. Otherwise they are computed from
    ``frequencies``.
    """
    Q_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    d = tl.arange(0, E)
    _, partner, second = channel_partners(HALF, E, INTERLEAVED)
    # First head and head count by kind: queries, keys, values.
    kind = tl.where(tile < Q_TILES, 0, tl.where(tile < Q_TILES + KV_TILES, 1, 2))
    base = tl.where(kind == 0, 0, tl.where(kind == 1, H, H + G))
    limit = tl.where(kind == 0, H, G)
    behind = tl.where(kind == 0, 0, tl.where(kind == 1, Q_TILES, Q_TILES + KV_TILES))
    head = (tile - behind) * HEADS + tl.arange(0, HEADS)
    keep = head < limit
    inside = keep[:, None] & (d < D)[None, :]
    row = qkv + token * qkv_stride
    at = (base + head)[:, None] * D
    x = tl.load(row + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
    real = position >= 0
    if kind < 2:
        other = tl.load(row + at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if not WHOLE:
            cos, sin = turn_of(position, frequencies, second)
        x = x * cos[None, :] + other * sin[None, :]
    x = tl.where(real, x, 0.0)
    here = head[:, None] * D + d[None, :]
    if kind == 0:
        tl.store(q_out + token * (H * D) + here, x.to(q_out.dtype.element_ty), mask=inside)
    else:
        page = tl.load(tables + slot * table_width + position // L, mask=real, other=0)
        rows = ((page.to(tl.int64) * 2 + kind - 1) * G + head) * L + position % L
        stored = store_rows(values, exponents, x, rows, keep & real, HEADS, D, E, BFP8)
        if COPIES:
            copy = tl.where(real, stored, 0.0).to(k_out.dtype.element_ty)
            if kind == 1:
                tl.store(k_out + token * (G * D) + here, copy, mask=inside)
            else:
                tl.store(v_out + token * (G * D) + here, copy, mask=inside)


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
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BFP8: tl.constexpr,
    COPIES: tl.constexpr,
    WHOLE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (t, i) computes tile i of token t. With ``WHOLE``, program (t, 0) computes all
    tiles.
    """
    release_dependents(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, E)
    frequency, _, second = channel_partners(HALF, E, INTERLEAVED)
    frequencies = tl.load(inv_freq + frequency, mask=d < 2 * HALF, other=0.0)
    wait_for_inputs(CHAINED)
    position, slot = tl.load(positions + token), tl.load(slots + token)
    if WHOLE:
        cos, sin = turn_of(position, frequencies, second)
        for tile in tl.static_range((H + HEADS - 1) // HEADS + 2 * ((G + HEADS - 1) // HEADS)):
            _rotate_tile(
                tile, token, position, slot, frequencies, cos, sin, qkv, q_out, k_out, v_out,
                qkv_stride, values, exponents, tables, table_width, H, G, D, E, HALF, L, HEADS,
                INTERLEAVED, BFP8, COPIES, True,
            )  # fmt: skip
    else:
        _rotate_tile(
            tl.program_id(1), token, position, slot, frequencies, frequencies, frequencies, qkv,
            q_out, k_out, v_out, qkv_stride, values, exponents, tables, table_width, H, G, D, E,
            HALF, L, HEADS, INTERLEAVED, BFP8, COPIES, False,
        )  # fmt: skip


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
    num_tiles = triton.cdiv(num_heads, HEADS) + 2 * triton.cdiv(pages.num_kv_heads, HEADS)
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
        L=PAGE,
        HEADS=HEADS,
        INTERLEAVED=interleaved,
        COPIES=k_out is not None,
        WHOLE=is_whole,
        num_warps=4,
        **chained(qkv),
    )
