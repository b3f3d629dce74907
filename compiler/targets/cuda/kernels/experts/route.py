"""Launcher for ``route.cu``: expert selection for a decode step, and pairs grouped in tiles.

Excludes operand sources. Shape letters: B tokens, E experts, K experts for a token, N
tiles.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import max_tiles

MAX_TOKENS = 64
MAX_EXPERTS = 512
MAX_CHOSEN = 32
TILE_PAIRS = 8
"""Token-expert pairs that share a read of the expert's weight."""

_WARPS = 16
_EACH = (4, 8, 16)  # logits in a lane


class RouteArguments(ctypes.Structure):
    """Mirror for `Route` in route.cu."""

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
    """A step's pairs by expert. Padding has no pairs.

    Attributes:
        tiles: Tile count, then expert by tile, int32 ``[1 + N]``.
        pairs: Pairs by tile, int16 ``[N, 8]``, padded with -1.
    """

    tiles: Tensor
    pairs: Tensor

    @classmethod
    def empty(cls, num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Self:
        """Allocate tiles for any pair distribution."""
        count = max_tiles(num_tokens * top_k, num_experts, TILE_PAIRS)
        return cls(
            torch.empty(1 + count, dtype=torch.int32, device=device),
            torch.empty(count, TILE_PAIRS, dtype=torch.int16, device=device),
        )


@dataclass(frozen=True, slots=True)
class TopKParams:
    """Inputs for expert selection; see :func:`route`."""

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
    """Select experts as :data:`ops.router`, and group their pairs in ``tiles``.

    Args:
        weights: float32 ``[B, K]``, 0 for padding.
        experts: int32 ``[B, K]``, -1 for padding.
        logits: float32 ``[B, E]`` with any row stride.
        positions: int64 ``[B]``. Negative: padding.
        first, count: This rank's experts, which are numbered from 0. Experts on peers are
            treated as padding. None: all experts.
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
    """Return the kernel arguments for a selection with its outputs."""
    num_tokens = len(choice.logits)
    arguments = arguments_of(choice, weights.shape[1])
    assert weights.shape == experts.shape == (num_tokens, arguments.top_k)
    assert weights.is_contiguous() and experts.is_contiguous() and num_tokens <= MAX_TOKENS
    most = max_tiles(num_tokens * arguments.top_k, arguments.count, TILE_PAIRS)
    assert len(tiles.pairs) >= most
    arguments.weights, arguments.experts = weights.data_ptr(), experts.data_ptr()
    arguments.tiles, arguments.pairs = tiles.tiles.data_ptr(), tiles.pairs.data_ptr()
    return arguments


def arguments_of(choice: TopKParams, top_k: int) -> RouteArguments:
    """Return the kernel arguments for a selection without its outputs."""
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
