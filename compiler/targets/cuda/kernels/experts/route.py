"""route.cu on the device: the experts of a decode step's tokens, and their pairs in tiles.

Knows nothing of where its operands come from.
Legend: B tokens, E experts, K experts of a token, N tiles.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import most_tiles

MAX_TOKENS = 64
MAX_EXPERTS = 512
MAX_CHOSEN = 32
TILE_PAIRS = 8
"""Pairs of a token and its expert that share a read of the expert's weight."""

_WARPS = 16
_EACH = (4, 8, 16)  # logits of a lane


class RouteArguments(ctypes.Structure):
    """`Route` of route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "positions", "weights", "experts")),
        *((name, ctypes.c_void_p) for name in ("tiles", "pairs")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_experts", "top_k")),
        *((name, ctypes.c_int) for name in ("logits_stride", "renormalise", "first", "count")),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("route.cu"),
    tuple(f"route_{what}{each}" for what in ("", "one_") for each in _EACH),
    headers=("primitives.cuh", "route_choose.cuh", "route_sort.cuh"),
    structures=(("Route", RouteArguments),),
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of a step by expert: ``tiles [1 + N]`` int32, how many tiles there are, then the expert
    of each; ``pairs [N, 8]`` int16, -1 where a tile has no more. Padding has no pairs.
    """

    tiles: Tensor
    pairs: Tensor

    @classmethod
    def empty(cls, num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Self:
        """Room for so many pairs, however they fall."""
        count = most_tiles(num_tokens * top_k, num_experts, TILE_PAIRS)
        return cls(
            torch.empty(1 + count, dtype=torch.int32, device=device),
            torch.empty(count, TILE_PAIRS, dtype=torch.int16, device=device),
        )


@dataclass(frozen=True, slots=True)
class TopKParams:
    """What tokens' experts are chosen by, as :func:`route` has it: ``logits [B, E]`` and
    ``positions [B]``.
    """

    logits: Tensor
    positions: Tensor
    renormalise: bool
    first: int = 0
    count: int | None = None


def route(
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    positions: Tensor,
    tiles: Tiles,
    *,
    renormalise: bool,
    first: int = 0,
    count: int | None = None,
) -> None:
    """:data:`ops.router` of ``logits [B, E]`` float32 into ``weights [B, K]`` float32 and
    ``experts [B, K]`` int32, 0 and -1 for tokens whose ``positions [B]`` int64 are negative; and
    their pairs into ``tiles``.

    Rows of ``logits`` may be further apart than they are long. ``first`` and ``count``: this rank's
    experts, which are counted from 0; others' are as padding's. None: all.
    """
    num_tokens, num_experts = logits.shape
    choice = TopKParams(logits, positions, renormalise, first, count)
    arguments = arguments_into(choice, weights, experts, tiles)
    each = next(count for count in _EACH if 32 * count >= num_experts)
    if num_tokens == 1:
        at = nvrtc.Launch((1, 1, 1), 32)
        nvrtc.launch(SOURCE, f"route_one_{each}", at=at, arguments=arguments)
        return
    num_blocks = next(count for count in (1, 2, 4) if count * _WARPS >= num_tokens)
    at = nvrtc.Launch((num_blocks, 1, 1), 32 * _WARPS, cluster=(num_blocks, 1, 1))
    nvrtc.launch(SOURCE, f"route_{each}", at=at, arguments=arguments)


def arguments_into(
    choice: TopKParams, weights: Tensor, experts: Tensor, tiles: Tiles
) -> RouteArguments:
    """What a kernel is told of a choice, and of where it goes."""
    num_tokens = len(choice.logits)
    arguments = arguments_of(choice, weights.shape[1])
    assert weights.shape == experts.shape == (num_tokens, arguments.top_k)
    assert weights.is_contiguous() and experts.is_contiguous() and num_tokens <= MAX_TOKENS
    most = most_tiles(num_tokens * arguments.top_k, arguments.count, TILE_PAIRS)
    assert len(tiles.pairs) >= most
    arguments.weights, arguments.experts = weights.data_ptr(), experts.data_ptr()
    arguments.tiles, arguments.pairs = tiles.tiles.data_ptr(), tiles.pairs.data_ptr()
    return arguments


def arguments_of(choice: TopKParams, top_k: int) -> RouteArguments:
    """All that a kernel is told of a choice but where it goes."""
    (num_tokens, num_experts), count = choice.logits.shape, choice.count
    count = num_experts - choice.first if count is None else count
    assert 0 <= choice.first < choice.first + count <= num_experts <= MAX_EXPERTS
    assert choice.logits.stride(1) == 1 and top_k <= min(num_experts, MAX_CHOSEN)
    return RouteArguments(
        logits=choice.logits.data_ptr(),
        positions=choice.positions.data_ptr(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        logits_stride=choice.logits.stride(0),
        renormalise=choice.renormalise,
        first=choice.first,
        count=count,
    )
