"""Attention from text tokens to image tiles, with normalized queries and no rotation.

A decode step divides each tile into splits, which do not depend on the batch. A prompt's token
reads its tiles in order, so its bits do not depend on the chunk.
Shape letters: R tokens, H query heads, G key/value heads, D head size, W tiles, P splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.attention.kv_cache import (
    Softmax,
    SplitPointers,
    empty_softmax,
    product,
    store_split,
)
from tilewright.compiler.targets.cuda.kernels.common.launch import (
    LOG2_E,
    block_of,
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.tuning import tuning

_TUNING = tuning()["attention"]["cross_attention"]
_SPLITS: int = _TUNING["splits"]
_PROMPT_TOKENS: int = _TUNING["prompt_tokens"]
_KEYS: int = _TUNING["keys"]
_ALIGNED = 8
TILE_UNIT = 16
"""Minimum tiles per decode token, and the unit of larger numbers."""
_MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class ImageTiles:
    """Image tiles by token. A tile has keys, then values, layer after layer.

    Attributes:
        anchor: Tensor with the tiles' type. Offsets begin at its first element.
        offsets: First element per tile, int64 ``[R, W]``, or ``[1, W]`` for all tokens.
        visible: First visible tile and end per token, int64 ``[R, 2]``.
        tile_keys: Keys per tile.
        width: Values from a key to the next.
    """

    anchor: Tensor
    offsets: Tensor
    visible: Tensor
    tile_keys: int
    width: int


@triton.jit
def _queries(q_ptr, norm_ptr, token, head, keep, q_stride, eps, D: tl.constexpr, E: tl.constexpr):
    """Return normalized queries, float32 ``[M, E]``."""
    d = tl.arange(0, E)
    here = token.to(tl.int64)[:, None] * q_stride + head[:, None] * D + d[None, :]
    x = tl.load(q_ptr + here, mask=keep[:, None] & (d < D)[None, :], other=0.0)
    weight = tl.load(norm_ptr + d, mask=d < D, other=0.0)
    factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * factor[:, None] * weight[None, :]


@triton.jit
def _attend_keys(
    q,
    sees,
    softmax,
    tile,
    first,
    end,
    width,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Add keys ``first`` to ``end`` at pointer ``tile`` to the softmax of ``sees [M]``."""
    d = tl.arange(0, E)
    peak, total, sums = softmax
    for start in range(first, end, L):
        key = start + tl.arange(0, L)
        inside = key < end
        here = tile + key.to(tl.int64)[:, None] * width + d[None, :]
        mask = inside[:, None] & (d < D)[None, :]
        k = tl.load(here, mask=mask, other=0.0)
        v = tl.load(here + G * D, mask=mask, other=0.0)
        scores = product(q, tl.trans(k), tl.zeros([M, L], tl.float32), CHAINED) * scale
        scores = tl.where(sees[:, None] & inside[None, :], scores, float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(peak - base)
        total = total * kept + tl.sum(weights, 1)
        weights = rounded(weights, v.dtype, CHAINED)
        sums = product(weights, v, sums * kept[:, None], CHAINED)
        peak = largest
    return Softmax(peak, total, sums)


@triton.jit
def _split_kernel(
    partial,
    peaks,
    totals,
    q_ptr,
    anchor,
    offsets,
    visible,
    norm,
    q_stride,
    offsets_stride,
    tile_keys,
    width,
    first_column,
    scale,
    eps,
    chunk,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (r, g, p) attends from token r to split p, for the query heads of g."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    token, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(visible + 2 * token) + split // SPLITS
    if at < tl.load(visible + 2 * token + 1):
        m = tl.arange(0, M)
        keep = m < H // G
        head = group * (H // G) + m
        q = _queries(q_ptr, norm, token + m * 0, head, keep, q_stride, eps, D, E)
        q = rounded(q, anchor.dtype.element_ty, CHAINED)
        offset = tl.load(offsets + token * offsets_stride + at)
        tile = anchor + tl.multiple_of(offset + first_column + group * D, ALIGN)
        first = (split % SPLITS) * chunk
        end = tl.minimum(first + chunk, tile_keys)
        softmax = empty_softmax(float("-inf"), M, E)
        softmax = _attend_keys(
            q, keep, softmax, tile, first, end, width, scale, G, D, E, M, L, CHAINED
        )
        own = (token.to(tl.int64) * H + head) * tl.num_programs(2) + split
        store_split(SplitPointers(peaks, totals, partial), softmax, own, keep, D, E)


@triton.jit
def _join_kernel(
    out,
    partial,
    peaks,
    totals,
    visible,
    out_stride,
    num_splits,
    D: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (r, h) adds the splits of a token and head, in order."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = (tl.load(visible + 2 * token + 1) - tl.load(visible + 2 * token)) * SPLITS
    d, p = tl.arange(0, E), tl.arange(0, P)
    own = (token * tl.num_programs(1) + head) * num_splits
    peak = tl.load(peaks + own + p, mask=p < count, other=float("-inf"))
    largest = tl.max(peak, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.load(totals + own + p, mask=p < count, other=0.0)
    total = tl.sum(weights * tl.exp2(peak - base), 0)
    sums = tl.zeros([E], tl.float32)
    for split in range(0, count):
        factor = tl.exp2(tl.load(peaks + own + split) - base)
        here = partial + (own + split) * D + d
        sums += tl.load(here, mask=d < D, other=0.0) * factor
    y = rounded(sums / tl.where(total == 0.0, 1.0, total), out.dtype.element_ty, CHAINED)
    tl.store(out + token * out_stride + head * D + d, y, mask=d < D)


@triton.jit
def _prompt_kernel(
    out,
    q_ptr,
    anchor,
    offsets,
    visible,
    norm,
    num_tokens,
    out_stride,
    q_stride,
    tile_keys,
    width,
    first_column,
    scale,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    ALIGN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (t, g) attends from a block of tokens, for the query heads of g."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    group, m, d = tl.program_id(1), tl.arange(0, M), tl.arange(0, E)
    token, head = tl.program_id(0) * (M // HEADS) + m // HEADS, m % HEADS
    keep = (token < num_tokens) & (head < H // G)
    head = group * (H // G) + head
    q = _queries(q_ptr, norm, token, head, keep, q_stride, eps, D, E)
    q = rounded(q, anchor.dtype.element_ty, CHAINED)
    first = tl.load(visible + 2 * token, mask=keep, other=0)
    end = tl.load(visible + 2 * token + 1, mask=keep, other=0)
    lowest = tl.min(tl.where(first < end, first, 1 << 30), 0)
    softmax = empty_softmax(float("-inf"), M, E)
    for at in range(lowest, tl.max(end, 0)):
        offset = tl.load(offsets + at)
        tile = anchor + tl.multiple_of(offset + first_column + group * D, ALIGN)
        sees = (at >= first) & (at < end)
        softmax = _attend_keys(
            q, sees, softmax, tile, 0, tile_keys, width, scale, G, D, E, M, L, CHAINED
        )
    total, sums = softmax.total, softmax.sums
    y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    here = token.to(tl.int64)[:, None] * out_stride + head[:, None] * D + d[None, :]
    y = rounded(y, out.dtype.element_ty, CHAINED)
    tl.store(out + here, y, mask=keep[:, None] & (d < D)[None, :])


def _sizes_of(tiles: ImageTiles, num_heads: int, num_kv_heads: int, dim: int) -> dict[str, int]:
    """Return constants of both kernels."""
    is_aligned = not (tiles.width % _ALIGNED or dim % _ALIGNED)
    num_keys = _KEYS // 2 if tiles.anchor.dtype == torch.float32 else _KEYS
    return {
        **{"H": num_heads, "G": num_kv_heads, "D": dim, "E": block_of(dim)},
        **{"L": num_keys, "ALIGN": _ALIGNED if is_aligned else 1},
    }


def scratch_bytes(num_tokens: int, num_heads: int, dim: int) -> int:
    """Return the bytes of all splits in a decode step, up to 256 tiles per token."""
    return 4 * max(num_tokens, _MIN_ROWS) * num_heads * TILE_UNIT * _SPLITS * (dim + 2)


def cross_attend(
    out: Tensor,
    q: Tensor,
    tiles: ImageTiles,
    norm: Tensor,
    *,
    eps: float,
    num_kv_heads: int,
    first: int,
    scale: float,
    decodes: bool,
) -> None:
    """Write the attention of ``q [R, H D]``, float32, to ``out [R, H D]``.

    Tokens without visible tiles have zero results.

    Args:
        out: float32 or bfloat16, with any stride.
        q: Queries before the norm, with any stride.
        tiles: Tiles by token. All tokens share the offsets if ``decodes`` is false.
        norm: The query norm's weight, float32 ``[D]``.
        eps: The query norm's epsilon.
        num_kv_heads: G.
        first: First column of the layer's keys in a tile.
        scale: Factor for the scores.
        decodes: Divide the tiles into splits, for decode steps.
    """
    (dim,), num_tokens = norm.shape, len(q)
    num_heads = q.shape[1] // dim
    heads = block_of(num_heads // num_kv_heads, minimum=1)
    sizes = _sizes_of(tiles, num_heads, num_kv_heads, dim)
    at = tiles.tile_keys, tiles.width, first, scale * LOG2_E, eps
    assert q.stride(1) == out.stride(1) == 1 and q.dtype == torch.float32
    assert tiles.visible.is_contiguous() and tiles.visible.shape == (num_tokens, 2)
    if not decodes:
        size = max(16, heads, _PROMPT_TOKENS)
        grid = (cdiv(num_tokens, size // heads), num_kv_heads)
        _prompt_kernel[grid](
            out,
            q,
            tiles.anchor,
            tiles.offsets,
            tiles.visible,
            norm,
            num_tokens,
            out.stride(0),
            q.stride(0),
            *at,
            **sizes,
            M=size,
            HEADS=heads,
            **chained(q),
        )
    else:
        _attend_splits(out, q, tiles, norm, at, sizes)


def _attend_splits(
    out: Tensor,
    q: Tensor,
    tiles: ImageTiles,
    norm: Tensor,
    at: tuple[int, int, int, float, float],
    sizes: dict[str, int],
) -> None:
    """Attend in splits of tiles. Steps with more tiles run in groups, within `scratch_bytes`."""
    (num_tokens, _), num_heads, dim = q.shape, sizes["H"], sizes["D"]
    heads = block_of(num_heads // sizes["G"], minimum=1)
    num_tiles = tiles.offsets.shape[1]
    num_splits = num_tiles * _SPLITS
    chunk = cdiv(cdiv(tiles.tile_keys, sizes["L"]), _SPLITS) * sizes["L"]
    step = max(1, min(num_tokens, max(num_tokens, _MIN_ROWS) * TILE_UNIT // num_tiles))
    shape = step, num_heads, num_splits
    peaks, totals = (torch.empty(shape, device=q.device) for _ in range(2))
    partial = torch.empty(*shape, dim, device=q.device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, begin + step)
        own_q, own_out, visible = q[rows], out[rows], tiles.visible[rows]
        offsets = tiles.offsets[rows] if len(tiles.offsets) > 1 else tiles.offsets
        _split_kernel[(len(own_q), sizes["G"], num_splits)](
            partial,
            peaks,
            totals,
            own_q,
            tiles.anchor,
            offsets,
            visible,
            norm,
            q.stride(0),
            tiles.offsets.stride(0) if len(tiles.offsets) > 1 else 0,
            *at,
            chunk,
            **sizes,
            M=max(16, heads),
            SPLITS=_SPLITS,
            **chained(q),
        )
        _join_kernel[(len(own_q), num_heads)](
            own_out,
            partial,
            peaks,
            totals,
            visible,
            out.stride(0),
            num_splits,
            D=dim,
            E=sizes["E"],
            P=block_of(num_splits, minimum=1),
            SPLITS=_SPLITS,
            **chained(q),
        )
