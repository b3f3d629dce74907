"""Launcher for gemm_experts.cu: a prompt's matmuls with expert weights in block formats.

Excludes operand sources. Shape letters: T tokens, K experts for a token, C columns, O rows of an
expert's weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import PLAIN, Finish
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import pair_stride, result_rows
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups, max_tiles
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_block import BlockTileConfig, GemmBlock
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    MOST_SHARED,
    STORE,
    SWIGLU,
    product_arguments,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

FORMATS = ("bfp8", "bfp4", "mxfp4")
TILE_SIZES = (32, 64, 128)
"""Pairs in a tile."""

_CHUNK = 64
_MAX_SMALL_PAIRS: int = tuning()["experts"]["max_pairs_per_expert"]


class _PairTiles(ctypes.Structure):
    """C++ `PairTiles`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("order", "tiles")),
        *((name, ctypes.c_int) for name in ("num_tiles", "top_k")),
    )


class _ArrangePairs(ctypes.Structure):
    """C++ `ArrangePairs`."""

    _fields_ = (
        ("pairs", _PairTiles),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int) for name in ("tile_size", "num_columns", "x_stride", "x_each")),
    )


class _GemmExperts(ctypes.Structure):
    """C++ `GemmExperts`."""

    _fields_ = (
        ("gemm", GemmBlock),
        ("pairs", _PairTiles),
        ("bias", ctypes.c_void_p),
        ("out_each", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("gemm_experts.cu"),
    (
        "arrange_pairs",
        *(f"gemm_experts_{fmt}_{size // 8}" for fmt in FORMATS for size in TILE_SIZES),
    ),
    headers=gemm_block.CODED_SOURCE.headers,
    structures=(
        *gemm_block.CODED_SOURCE.structures,
        ("PairTiles", _PairTiles),
        ("ArrangePairs", _ArrangePairs),
        ("GemmExperts", _GemmExperts),
    ),
)


def tile_size(num_pairs: int, num_experts: int) -> int:
    """Return the pairs per tile: the first size that holds the experts' mean."""
    return next((size for size in TILE_SIZES if size * num_experts >= num_pairs), TILE_SIZES[-1])


def max_small_rows(num_experts: int, top_k: int) -> int:
    """Return the largest row count for `experts.cu`, which reads a weight for 8 pairs: measured
    faster on an H200 with up to 4 pairs per expert.
    """
    return _MAX_SMALL_PAIRS * num_experts // top_k


def arranged_bytes(num_pairs: int, num_experts: int, num_columns: int) -> int:
    """Return the scratch size of :func:`expert_linear` in bytes."""
    size = tile_size(num_pairs, num_experts)
    return max_tiles(num_pairs, num_experts, size) * size * -(-num_columns // 128) * 256


def expert_linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    groups: Groups,
    *,
    top_k: int,
    swiglu: bool = False,
    finish: Finish = PLAIN,
) -> None:
    """Run :func:`.experts_triton.expert_linear` with weights in `FORMATS`.

    Args:
        out: bfloat16 ``[T, K O]`` with any row stride.
        x: bfloat16 ``[T, >= C]`` for all experts, or ``[T, K C]``.
        packed: Packed weights.
        groups: Pairs in tiles of a size in `TILE_SIZES`.
        swiglu: The weight has paired gate and up rows, and the result is silu(gate) * up.
        finish: Biases, and the bound of SwiGLU.
    """
    num_tiles, size = groups.tiles.shape[1], groups.tile_size
    num_rows = result_rows(out, packed, top_k, swiglu=swiglu)
    assert out.dtype == x.dtype == torch.bfloat16 and out.stride(1) == 1 == x.stride(1)
    assert packed.format in FORMATS and packed.data.data_ptr() % 16 == 0
    arranged = torch.empty(
        num_tiles * size * packed.num_column_tiles * 256, dtype=torch.uint8, device=x.device
    )
    pairs = _PairTiles(groups.order.data_ptr(), groups.tiles.data_ptr(), num_tiles, top_k)
    _arrange(arranged, x, packed, pairs, size)
    product = product_arguments(
        out, packed, epilogue=SWIGLU if swiglu else STORE, num_tokens=len(x), bias=None
    )
    product.x, product.x_stride, product.num_rows = arranged.data_ptr(), num_tiles * size, num_rows
    way = BlockTileConfig(size // 8, 2, 2, is_whole=True)
    shared, depth = way.shared_bytes(packed), way.depth(packed)
    assert shared <= MOST_SHARED and depth > 1
    bias, limit, alpha = finish.checked(packed.num_experts * num_rows, swiglu=swiglu)
    arguments = _GemmExperts(
        gemm=GemmBlock(product=product, depth=depth),
        pairs=pairs,
        bias=None if bias is None else bias.data_ptr(),
        out_each=num_rows,
        limit=limit,
        alpha=alpha,
    )
    row_blocks = -(-packed.num_row_tiles // way.row_tiles(packed))
    at = nvrtc.Launch((num_tiles, row_blocks, 1), 256, shared)
    name = f"gemm_experts_{packed.format}_{size // 8}"
    nvrtc.launch(SOURCE, name, at=at, arguments=arguments)


def _arrange(
    out: Tensor, x: Tensor, packed: PackedWeight, pairs: _PairTiles, tile_size: int
) -> None:
    num_columns = packed.num_columns
    assert x.stride(0) % 2 == 0 == x.data_ptr() % 4 and num_columns % 2 == 0
    arguments = _ArrangePairs(
        pairs=pairs,
        x=x.data_ptr(),
        out=out.data_ptr(),
        tile_size=tile_size,
        num_columns=num_columns,
        x_stride=x.stride(0),
        x_each=pair_stride(x, packed, pairs.top_k),
    )
    blocks = pairs.num_tiles * tile_size // 32, packed.num_column_tiles * 128 // _CHUNK, 1
    nvrtc.launch(SOURCE, "arrange_pairs", at=nvrtc.Launch(blocks, 256), arguments=arguments)
