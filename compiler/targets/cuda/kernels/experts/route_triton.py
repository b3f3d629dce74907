"""Triton expert selection, and grouping of pairs in tiles with a single expert.

A pair is a token and a selected expert: token t has the pairs t K .. t K + K - 1. Shape letters: T
tokens, E experts, K experts for a token, P = T K pairs. Tokens at negative positions are padding
without experts.
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
    chained,
    release_dependents,
    wait_for_inputs,
)

_MAX_SMALL_PAIRS = 64
"""Maximum pairs for sorting by a single program. With more, two kernels are faster."""
_STEP = tl.constexpr(16)  # pairs that a program compares at a time
_BLOCK = tl.constexpr(1024)
_MOST_TOGETHER = 8192  # pairs that a program loads at a time


def max_tiles(num_pairs: int, num_experts: int, tile_size: int) -> int:
    """Return the maximum tile count for any pair distribution."""
    fewest = min(num_pairs, num_experts)  # experts with a partial tile
    return fewest + (num_pairs - fewest) // tile_size


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs, sorted by expert, without padding.

    Attributes:
        order: Sorted pairs, int32 ``[P]``.
        tiles: Expert, first index and end index in ``order`` by tile, int32 ``[3, N]``. The expert
            is -1 for unused tiles.
        counts: Scratch ``[2, E]``.
        tile_size: Maximum pairs in a tile.
    """

    order: Tensor
    tiles: Tensor
    counts: Tensor
    tile_size: int

    @classmethod
    def empty(cls, num_pairs: int, num_experts: int, tile_size: int, device: torch.device) -> Self:
        """Allocate groups for any pair distribution."""
        num_tiles = max_tiles(num_pairs, num_experts, tile_size)
        order, tiles, counts = (
            torch.empty(size, dtype=torch.int32, device=device)
            for size in ((num_pairs,), (3, num_tiles), (2, num_experts))
        )
        return cls(order, tiles, counts, tile_size)


@triton.jit
def _route_kernel(
    weights_ptr,
    experts_ptr,
    logits_ptr,
    positions_ptr,
    order_ptr,
    tiles_ptr,
    num_experts,
    top_k,
    logits_stride,
    own_first,
    own_count,
    bias_ptr,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, E), tl.arange(0, K)
    inside = expert < num_experts
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=inside, other=-float("inf"))
    if bias_ptr is not None:
        shares = tl.sigmoid(logits)
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
        left = tl.where(inside, shares + bias, -float("inf"))
    else:
        shares = tl.exp(logits - tl.max(logits, 0))
        shares = shares / tl.sum(shares, 0)
        left = tl.where(inside, shares, -1.0)
    weights = tl.zeros((K,), tl.float32)
    chosen = tl.zeros((K,), tl.int32)
    for index in range(top_k):
        likely, best = tl.max(left, 0, return_indices=True)
        if bias_ptr is not None:
            likely = tl.sum(tl.where(expert == best, shares, 0.0), 0)
        weights = tl.where(choice == index, likely, weights)
        # With NaN logits any expert may be selected, but it must exist.
        chosen = tl.where(choice == index, tl.minimum(best, num_experts - 1), chosen)
        left = tl.where(expert == best, -1.0 if bias_ptr is None else -float("inf"), left)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    if bias_ptr is not None:
        weights *= scale
    chosen -= own_first
    is_own = (chosen >= 0) & (chosen < own_count)
    chosen = tl.where(is_own & (tl.load(positions_ptr + token) >= 0), chosen, -1)
    there = choice < top_k
    tl.store(weights_ptr + token * top_k + choice, weights, mask=there)
    tl.store(experts_ptr + token * top_k + choice, chosen, mask=there)
    if order_ptr is not None:  # a single token has a tile for each pair
        tl.store(order_ptr + choice, choice, mask=there)
        tl.store(tiles_ptr + choice, chosen, mask=there)
        tl.store(tiles_ptr + top_k + choice, choice, mask=there)
        tl.store(tiles_ptr + 2 * top_k + choice, choice + 1, mask=there)


def route(
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    positions: Tensor,
    *,
    renormalise: bool,
    groups: Groups | None = None,
    first: int = 0,
    count: int | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Select experts as :data:`ops.router`.

    Args:
        weights: float32 ``[T, K]``.
        experts: int32 ``[T, K]``, -1 for padding.
        logits: float32 ``[T, E]`` with any row stride.
        positions: int64 ``[T]``. Negative: padding.
        groups: Also group a single token's pairs.
        first, count: This rank's experts, which are numbered from 0. Experts on peers
            become -1. None: all experts.
        bias: float32 ``[E]`` for a sigmoid router. None: softmax.
        scale: Factor for a sigmoid router's weights.
    """
    num_tokens, num_experts = logits.shape
    top_k = weights.shape[1]
    assert weights.shape == experts.shape == (num_tokens, top_k) and logits.stride(1) == 1
    assert weights.is_contiguous() and experts.is_contiguous() and top_k <= num_experts
    count = num_experts - first if count is None else count
    assert 0 <= first < first + count <= num_experts
    assert groups is None or (num_tokens == 1 and groups.tiles.shape == (3, top_k))
    _route_kernel[(num_tokens,)](
        weights,
        experts,
        logits,
        positions,
        None if groups is None else groups.order,
        None if groups is None else groups.tiles,
        num_experts,
        top_k,
        logits.stride(0),
        first,
        count,
        bias,
        scale,
        E=block_of(num_experts),
        K=block_of(top_k, minimum=1),
        RENORMALISE=renormalise,
        num_warps=min(8, max(1, block_of(num_experts) // 256)),
        **chained(logits),
    )


@triton.jit
def _store_tiles(
    tiles_ptr, counts, starts, num_tokens, num_tiles, E: tl.constexpr, TILE: tl.constexpr
):
    """Store the tiles of all experts, with pairs ``[starts, starts + counts)``. Clear unused
    tiles.
    """
    each = tl.arange(0, E)
    tiles = (counts + TILE - 1) // TILE
    firsts = tl.cumsum(tiles, 0) - tiles
    for part in range((num_tokens + TILE - 1) // TILE):  # a token selects an expert at most once
        at = tiles_ptr + firsts + part
        has = part < tiles
        tl.store(at, each, mask=has)
        tl.store(at + num_tiles, starts + part * TILE, mask=has)
        last = starts + tl.minimum(counts, (part + 1) * TILE)
        tl.store(at + 2 * num_tiles, last, mask=has)
    used = tl.sum(tiles, 0)
    for first in range(0, num_tiles, _BLOCK):
        tile = first + tl.arange(0, _BLOCK)
        tl.store(tiles_ptr + tile, -1, mask=(tile >= used) & (tile < num_tiles))


@triton.jit
def _group_small_kernel(
    order_ptr,
    tiles_ptr,
    experts_ptr,
    num_pairs,
    num_tokens,
    num_tiles,
    P: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Sort pairs by expert, then by token. A pair's index is the number of smaller pairs."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    pair, each = tl.arange(0, P), tl.arange(0, E)
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
    key = expert * P + pair
    place, counts = tl.zeros((P,), tl.int32), tl.zeros((E,), tl.int32)
    for first in range(0, num_pairs, _STEP):
        other = first + tl.arange(0, _STEP)
        found = tl.load(experts_ptr + other, mask=other < num_pairs, other=-1)
        before = ((found * P + other)[None, :] < key[:, None]) & (found >= 0)[None, :]
        place += tl.sum(before.to(tl.int32), 1)
        counts += tl.sum((found[None, :] == each[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + place, pair, mask=expert >= 0)
    starts = tl.cumsum(counts, 0) - counts
    _store_tiles(tiles_ptr, counts, starts, num_tokens, num_tiles, E, TILE)


@triton.jit
def _order_kernel(
    order_ptr,
    counts_ptr,
    experts_ptr,
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program e sorts the pairs of its expert after the pairs of smaller experts."""
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert = tl.program_id(0)
    start = tl.zeros((), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        start += tl.sum(((found >= 0) & (found < expert)).to(tl.int32), 0)
    end = start
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        ours = (found == expert).to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(ours, 0) - 1, pair, mask=ours != 0)
        end += tl.sum(ours, 0)
    tl.store(counts_ptr + expert, end - start)
    tl.store(counts_ptr + num_experts + expert, start)


@triton.jit
def _tiles_kernel(
    tiles_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    num_tiles,
    E: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    each = tl.arange(0, E)
    counts = tl.load(counts_ptr + each, mask=each < num_experts, other=0)
    starts = tl.load(counts_ptr + num_experts + each, mask=each < num_experts, other=0)
    _store_tiles(tiles_ptr, counts, starts, num_tokens, num_tiles, E, TILE)


def group(groups: Groups, experts: Tensor) -> None:
    """Sort the pairs of ``experts [T, K]`` int32 and cut them into tiles, on the device."""
    num_tokens, top_k = experts.shape
    num_pairs, num_experts = num_tokens * top_k, groups.counts.shape[1]
    num_tiles = groups.tiles.shape[1]
    assert groups.order.shape == (num_pairs,) and experts.is_contiguous()
    block = block_of(num_experts)
    sizes = {"E": block, "TILE": groups.tile_size, "num_warps": 8, **chained(experts)}
    if num_pairs <= _MAX_SMALL_PAIRS:
        _group_small_kernel[(1,)](
            groups.order,
            groups.tiles,
            experts,
            num_pairs,
            num_tokens,
            num_tiles,
            P=block_of(num_pairs),
            **sizes,
        )
        return
    _order_kernel[(num_experts,)](
        groups.order,
        groups.counts,
        experts,
        num_pairs,
        num_experts,
        BLOCK=min(_MOST_TOGETHER, block_of(num_pairs)),
        num_warps=8,
        **chained(experts),
    )
    _tiles_kernel[(1,)](groups.tiles, groups.counts, num_tokens, num_experts, num_tiles, **sizes)
