"""Launchers for gemm_block_e4m3.cu: matmuls of 33 to 64 tokens with bfp4 weights and e4m3 codes of
x, and the codes of a norm.

Excludes operand sources.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.matmul.e4m3 import ORDERED
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import (
    TensorMap,
    map_of,
    takes_turns,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_block import MAX_DEPTH, tile_map
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    MatmulParams,
    product_arguments,
    room_of,
)
from tilewright.compiler.targets.cuda.weights.e4m3 import CODES, LEAST_LOFI
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    TILE_BYTES,
    TILE_COLUMNS,
    PackedWeight,
)

MAX_TOKENS = 64
"""Maximum tokens of a matmul."""

_GROUPS = 4  # of four warps


class _NormCodes(ctypes.Structure):
    """C++ `NormCodes`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "codes", "scales")),
        *((name, ctypes.c_int) for name in ("num_columns", "x_stride", "codes_stride")),
        ("is_arranged", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class _GemmBlockE4M3(ctypes.Structure):
    """C++ `GemmBlockE4M3`."""

    _fields_ = (
        *((name, TensorMap) for name in ("weight", "x")),
        ("product", MatmulParams),
        *((name, ctypes.c_void_p) for name in ("weight_scales", "token_scales")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("depth", "tiles", "padding")),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("gemm_block_e4m3.cu"),
    ("block_e4m3", "norm_codes"),
    headers=(
        "primitives.cuh",
        "matrix_unit.cuh",
        "tiles.cuh",
        "arrange.cuh",
        "finish.cuh",
        "deferred_norm.cuh",
        "norm.cuh",
        "gemm_bf16.cuh",
        "gemm_block.cuh",
    ),
    structures=(
        ("TensorMap", TensorMap),
        ("Product", MatmulParams),
        ("NormCodes", _NormCodes),
        ("GemmBlockE4M3", _GemmBlockE4M3),
    ),
)


@dataclass(frozen=True, slots=True)
class CodeTileConfig:
    """Tile sizes for a launch: row tiles per block."""

    tiles: int

    @property
    def depth(self) -> int:
        """Return the 128-column steps in flight."""
        return min(MAX_DEPTH, room_of(1) // self._step_bytes)

    @property
    def shared_bytes(self) -> int:
        """Return a block's dynamic shared memory, for steps aligned to 1,024 bytes."""
        return self.depth * self._step_bytes + 1024

    @property
    def _step_bytes(self) -> int:
        return MAX_TOKENS * TILE_COLUMNS + self.tiles * TILE_BYTES["bfp4"]


def rows_of(packed: PackedWeight) -> range:
    """Return the token counts for this kernel, with large weights only.

    In whole models, an H200 ran them faster than a kernel with e4m3 copies.
    """
    is_whole = packed.num_columns % ORDERED == 0
    return range(LEAST_LOFI, MAX_TOKENS + 1) if is_whole and takes_turns(packed) else range(0)


def choose_way(packed: PackedWeight) -> CodeTileConfig:
    """Return the tile sizes that spread row tiles evenly over all multiprocessors."""
    count, total = num_processors(packed.data.device), packed.num_row_tiles
    turns = -(-total // (count * 4 * _GROUPS))
    return CodeTileConfig(-(-total // (turns * count)))


def linear(
    out: Tensor,
    x: tuple[Tensor, Tensor],
    packed: PackedWeight,
    weight_scales: Tensor,
    *,
    epilogue: int,
    bias: Tensor | None = None,
    feeds: int = 0,
    alone: bool = False,
) -> None:
    """Run :func:`.gemv.linear` for e4m3 codes of x, with up to `MAX_TOKENS` rows.

    Args:
        out: as in :func:`.gemv.linear`.
        x: codes ``[M, K]`` ordered by :func:`.e4m3.position_of`, and scales ``[M, 1]``.
        packed: a weight in bfp4.
        weight_scales: float32 ``[N, 1]`` from :func:`...weights.e4m3.exact_rows`.
        epilogue: as in :func:`.gemv.linear`.
        bias: fp32 ``[N]``.
        feeds: see :func:`.gemm_block.linear`.
        alone: the next kernel starts after this kernel.
    """
    codes, token_scales = x
    num_tokens, way = len(codes), choose_way(packed)
    assert packed.kind == "bfp4" and num_tokens <= MAX_TOKENS
    assert packed.num_columns % ORDERED == 0
    product = product_arguments(out, packed, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.places, product.alone = feeds, alone
    product.scale.all = 1.0  # the weight's scales include it
    arguments = _GemmBlockE4M3(
        weight=tile_map(packed, way.tiles),
        x=map_of(codes, MAX_TOKENS),
        product=product,
        weight_scales=weight_scales.data_ptr(),
        token_scales=token_scales.data_ptr(),
        scale=packed.scale,
        depth=way.depth,
        tiles=way.tiles,
    )
    blocks = min(-(-packed.num_row_tiles // way.tiles), num_processors(out.device))
    at = nvrtc.Launch((1, blocks, 1), 128 * _GROUPS + 32, way.shared_bytes)
    nvrtc.launch(SOURCE, "block_e4m3", at=at, arguments=arguments)


def norm_codes(
    x: Tensor, weight: Tensor, eps: float, *, is_arranged: bool
) -> tuple[Tensor, Tensor]:
    """Return codes and scales for the RMSNorm of ``x [M, K]`` float32, in new memory.

    The norm is rounded to bfloat16, then as in :func:`.e4m3.round_rows`. K must satisfy
    :func:`.gemv.takes_norm`.
    """
    num_tokens, width = x.shape
    assert x.dtype == torch.float32 and x.stride(0) % 4 == 0 == x.data_ptr() % 16
    assert not (is_arranged and width % ORDERED)
    codes = torch.empty(num_tokens, width, dtype=CODES, device=x.device)
    scales = torch.empty(num_tokens, 1, dtype=torch.float32, device=x.device)
    arguments = _NormCodes(
        x=x.data_ptr(),
        norm=weight.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        num_columns=width,
        x_stride=x.stride(0),
        codes_stride=width,
        is_arranged=is_arranged,
        eps=eps,
    )
    at = nvrtc.Launch((num_tokens, 1, 1), 256)
    nvrtc.launch(SOURCE, "norm_codes", at=at, arguments=arguments)
    return codes, scales
