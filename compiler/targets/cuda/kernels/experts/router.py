"""Launcher for ``router.cu``: router logits and expert selection in one launch.

Excludes operand sources. Shape letters: B tokens, K experts for a token.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_bf16
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import (
    CHUNK_BYTES,
    GROUP_ROWS,
    num_chunks,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import MOST_SHARED
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAX_SMALL_M = gemm_bf16.MAX_SMALL_M
"""Maximum tokens for batch-invariant matmuls, which this kernel does not support."""

MAX_TOKENS: int = tuning()["experts"]["router_max_rows"]
"""Maximum tokens for which one launch is faster than two."""

MAX_EXPERTS = 256

_EIGHTS = (2, 4)
_GROUPS, _MOST_STEPS = 5, 4
_MOST_ROWS = _GROUPS * GROUP_ROWS
_PITCH = _MOST_ROWS + 4
_SLICES = 8  # slices of K; their blocks are the cluster


class _RouterParams(ctypes.Structure):
    """Mirror for `Router` in router.cu."""

    _fields_ = (
        *((name, gemm_bf16.TensorMap) for name in ("weight", "x")),
        ("route", native_route.RouteArguments),
        *((name, ctypes.c_int) for name in ("num_rows", "num_chunks")),
        ("unused", ctypes.c_int * 10),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("router.cu"),
    tuple(f"router_{eights}" for eights in _EIGHTS),
    headers=(
        *("primitives.cuh", "matrix_unit.cuh", "tiles.cuh", "arrange.cuh", "finish.cuh"),
        *("gemm_bf16.cuh", "route_choose.cuh", "route_sort.cuh"),
    ),
    structures=(
        ("TensorMap", gemm_bf16.TensorMap),
        ("Route", native_route.RouteArguments),
        ("Router", _RouterParams),
    ),
)


def takes(packed: PackedWeight, num_experts: int) -> bool:
    """Return whether the cluster's shared memory fits a router's weight.

    The weight may have more rows after those of the experts.
    """
    is_plain = packed.kind == "bf16" and packed.num_experts == 1 and not packed.is_paired
    fits = packed.num_rows <= _MOST_ROWS and _num_steps(packed) <= _MOST_STEPS
    return is_plain and fits and num_experts <= MAX_EXPERTS


def _num_steps(packed: PackedWeight) -> int:
    """Return the maximum chunk count in a slice."""
    return -(-num_chunks(packed.num_columns) // _SLICES)


def router(
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    x: Tensor,
    packed: PackedWeight,
    positions: Tensor,
    tiles: native_route.Tiles,
    *,
    renormalise: bool,
    num_experts: int,
    first: int = 0,
    count: int | None = None,
) -> None:
    """Compute ``logits = x packed^T`` and select experts from the first ``num_experts`` logits.

    Args:
        logits: float32 ``[B, N]``.
        x: bfloat16 ``[B, C]`` with rows aligned to 16 bytes.
        packed: The router's packed weight.

    See :func:`.route.route` for the remaining arguments.
    """
    num_tokens = len(x)
    assert x.dtype == torch.bfloat16 and logits.shape == (num_tokens, packed.num_rows)
    choice = native_route.TopKParams(logits[:, :num_experts], positions, renormalise, first, count)
    route = native_route.arguments_into(choice, weights, experts, tiles)
    eights = next(each for each in _EIGHTS if num_tokens <= 8 * each)
    arguments = _RouterParams(
        weight=gemm_bf16.map_of(packed.data, GROUP_ROWS),
        x=gemm_bf16.map_of(x, 8 * eights),
        route=route,
        num_rows=packed.num_rows,
        num_chunks=num_chunks(packed.num_columns),
    )
    steps, groups = _num_steps(packed), -(-packed.num_rows // GROUP_ROWS)
    chunk = (groups * GROUP_ROWS + 8 * eights) * CHUNK_BYTES
    room = max(steps * chunk + 1024, 8 * eights * _PITCH * 4)
    assert steps <= _MOST_STEPS and room <= MOST_SHARED
    at = nvrtc.Launch((_SLICES, 1, 1), 128 * _GROUPS, room, cluster=(_SLICES, 1, 1))
    nvrtc.launch(SOURCE, f"router_{eights}", at=at, arguments=arguments)
