"""Launcher for gemv.cu: kernel selection and the split into blocks.

Excludes operand sources.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    EXPERT_TILE_BYTES,
    TILE_BYTES,
    PackedWeight,
    tile_bytes,
)

MAX_TOKENS = 64
MAX_NORM_COLUMNS = 8192
STORE, ADD, SWIGLU = 0, 1, 2

MOST_SHARED = nvrtc.MOST_SHARED - 2048
"""Maximum bytes of dynamic shared memory per block. Static shared memory takes the rest."""

_KEPT = 3072  # bytes per block for the device and static shared memory

UNCUT_TILES = 1024
"""Row tiles of a weight from which its K is not split."""

_HEADERS = ("primitives.cuh", "tiles.cuh", "norm.cuh", "gemv.cuh", "gemm.cuh")
SLICES = 8
"""Slices of a split K, and the maximum sums for a value."""
SUMMED = ("q40", "q80", "fp8")
"""Formats with scales for the sums of blocks."""

CODED = (*SUMMED, "nvfp4")
"""Formats of `gemv_coded.cu`."""

LIKE = dict(zip(CODED, ("bfp4", "bfp8", "bfp8", "bfp4"), strict=True))
"""Formats with the tuning values of a block format with tiles of about the same size."""

_UNITS = {"q40": 64.0, "q80": 64.0}
"""Divisor of codes in `decode_pair`, see `tiles.cuh`."""

STEP_BYTES = {"bf16": 4096, **TILE_BYTES, **EXPERT_TILE_BYTES}
STEP_BYTES |= {name: tile_bytes(name) for name in CODED}
X_PADDING = 8
_CODED_X_PADDING = 32
_NUM_THREADS = 256


class MatmulScale(ctypes.Union):
    """C++ `Product.scale`: of all values, or of rows."""

    _fields_ = (("all", ctypes.c_float), ("rows", ctypes.c_void_p))


class MatmulParams(ctypes.Structure):
    """C++ `Product`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "norm", "bias", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_columns")),
        *((name, ctypes.c_int) for name in ("num_tiles", "num_steps", "num_slices")),
        *((name, ctypes.c_int) for name in ("x_stride", "out_stride", "epilogue")),
        *((name, ctypes.c_int) for name in ("places", "alone")),
        ("eps", ctypes.c_float),
        ("scale", MatmulScale),
    )


class _Leaving(ctypes.Structure):
    """C++ `Leaving`."""

    _fields_ = (("product", MatmulParams), ("normed", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Walk:
    """Launch of a small matmul, which reads its weight once.

    Attributes:
        depth: Steps of 128 columns in flight per warp.
        blocks_each: Blocks per multiprocessor.
        groups: Tokens divided by 8. 0: a single token.
    """

    depth: int
    blocks_each: int
    groups: int = 0

    def kernel(self, kind: str, *, leaves: bool = False) -> str:
        """Return the kernel's name. ``leaves``: the kernel also stores the norm."""
        return (
            f"leaves_{kind}_{self.depth}" if leaves else f"gemv_{kind}_{self.groups}_{self.depth}"
        )

    def shared_bytes(self, kind: str, num_steps: int) -> int:
        """Return a block's dynamic shared memory, for ``num_steps`` steps of x. With a single
        token, it leaves a multiprocessor no memory for a further block.
        """
        x_bytes, ring = num_steps * 256, 8 * self.depth * STEP_BYTES[kind]
        if self.groups:
            return self.groups * 8 * (x_bytes + 2 * x_padding(kind)) + ring
        return max(x_bytes + ring, nvrtc.min_shared(self.blocks_each))

    def has_room(self, kind: str, num_steps: int) -> bool:
        """Return whether the blocks fit a multiprocessor."""
        fixed = max(1, self.groups * 8) * 1024 + 1024  # for sums of slices, and for the norm
        each = self.shared_bytes(kind, num_steps) + fixed + nvrtc.RESERVED
        return self.blocks_each * each <= nvrtc.MOST_SHARED + nvrtc.RESERVED


@dataclass(frozen=True, slots=True)
class LaunchGrid:
    """Launch sizes for several tokens: warps per block, row tiles per warp, steps in flight."""

    num_warps: int
    tiles_per_warp: int
    depth: int

    @property
    def tiles_per_block(self) -> int:
        return self.num_warps * self.tiles_per_warp

    def kernel(self, kind: str, groups: int) -> str:
        """Return the kernel's name, for ``groups * 8`` tokens."""
        return f"gemm_{kind}_{groups}_{self.tiles_per_warp}_{self.depth}"

    def shared_bytes(self, packed: PackedWeight, groups: int) -> int:
        """Return a block's dynamic shared memory, for ``groups * 8`` tokens."""
        x_bytes = groups * 8 * (128 + x_padding(packed.format)) * 2
        shared = self.depth * (x_bytes + self.tiles_per_block * STEP_BYTES[packed.kind])
        partials = groups * 8 * (self.tiles_per_block * 16 + 8) * 4
        return max(shared, partials if num_slices(packed) > 1 else 0)


def x_padding(format_name: str) -> int:
    """Return the padding columns for rows of x in shared memory."""
    return _CODED_X_PADDING if format_name in CODED else X_PADDING


def room_of(num_resident: int) -> int:
    """Return a block's bytes of dynamic shared memory with ``num_resident`` blocks."""
    return (MOST_SHARED + 2048) // num_resident - _KEPT


def takes_norm(num_columns: int) -> bool:
    """Return whether these kernels support norms with ``num_columns`` columns."""
    return num_columns <= MAX_NORM_COLUMNS and num_columns % 4 == 0


def leaves_norm(packed: PackedWeight) -> bool:
    """Return whether a single token's matmul can also store its norm."""
    return packed.kind == "bf16" and takes_norm(packed.num_columns)


def num_slices(packed: PackedWeight) -> int:
    """Return the slices of K. They depend only on the weight, so results are batch-invariant.

    A large weight has rows for all warps on the device without slices.
    """
    return 1 if packed.num_row_tiles >= UNCUT_TILES else SLICES


def room_for(num_rows: int) -> int:
    """Return the buffer rows for steps with ``num_rows``. Kernels read whole eights."""
    return max(num_rows, MAX_TOKENS)


def most_tokens(packed: PackedWeight) -> int:
    """Return the maximum tokens. For larger bfloat16 batches, cuBLAS is faster."""
    if packed.kind != "bf16":
        return MAX_TOKENS
    is_small = packed.num_row_tiles <= 256 and packed.num_column_tiles <= 32
    return 32 if num_slices(packed) == 1 or is_small else 16


_GEMV = tuning()["matmul"]["gemv"]


def _tuned(name: str) -> dict[str, Any]:
    """Return tuning values by format."""
    values: dict[str, Any] = _GEMV[name]
    return {name: values[like] for name, like in LIKE.items()} | values


_WALKS: dict[str, tuple[Walk, ...]] = {
    kind: tuple(Walk(*sizes) for sizes in walks) for kind, walks in _tuned("walks").items()
}
"""Launches for a single token. The first that fits is selected. From whole models on an H200: a
block per multiprocessor is as fast in a chain of equal shapes, but slower in a model."""

_SMALL_M_DEPTH: dict[str, int] = _tuned("few_depth")
"""Depth for 2 to 16 tokens, with a block per multiprocessor."""


def choose_walk(packed: PackedWeight, num_tokens: int = 1) -> Walk | None:
    """Return the launch for a single read of the weight, or None if a grid is faster."""
    kind, steps = packed.kind, packed.num_column_tiles
    if num_tokens == 1:
        walks = _WALKS[kind]
        return next((walk for walk in walks if walk.has_room(kind, steps)), walks[-1])
    if num_tokens > 16 or not _walks_well(packed, num_tokens):
        return None
    walk = Walk(_SMALL_M_DEPTH[kind], 1, _token_groups(num_tokens))
    assert walk.has_room(kind, steps)
    return walk


def _walks_well(packed: PackedWeight, num_tokens: int) -> bool:
    """Return whether `Walk` is faster than `LaunchGrid` for a weight with a split K.

    From an H200 with 4, 8 and 16 tokens: bfloat16 in a whole model, block formats in chains of
    equal shapes. With more columns, the early copies of x cost more than they save.
    """
    if num_slices(packed) == 1:
        return False
    is_short = packed.num_column_tiles <= _SHORT_STEPS
    if packed.kind == "bf16" and num_tokens <= 8:
        return is_short or (packed.num_column_tiles <= 32 and packed.num_row_tiles <= 128)
    return is_short and (packed.kind != "bf16" or packed.num_row_tiles > _MAX_SMALL_TILES)


_GRIDS = {
    kind: {
        int(eights): tuple(LaunchGrid(*sizes) for sizes in grids) for eights, grids in each.items()
    }
    for kind, each in _tuned("grids").items()
}
"""Launch sizes by tokens divided by 8. Each entry is for small weights with short rows, small
weights, larger weights, and weights without a split K.

Measured on an H200. The eight blocks of a split K are a cluster within 16 or 18 multiprocessors.
Blocks of eight warps would wait there, although they fit the device.
"""

_MAX_SMALL_TILES: int = _GEMV["few_tiles"]
_SHORT_STEPS: int = _GEMV["short_steps"]
_MAX_SHORT_COLUMNS: int = _GEMV["few_columns"]


def choose_grid(packed: PackedWeight, num_tokens: int) -> LaunchGrid:
    """Return the launch sizes for several tokens."""
    small_short, small_long, medium, large = _GRIDS[packed.kind][_token_groups(num_tokens)]
    if num_slices(packed) == 1:
        return large
    if packed.num_row_tiles > _MAX_SMALL_TILES:
        return medium
    return small_short if packed.num_columns <= _MAX_SHORT_COLUMNS else small_long


def _token_groups(num_tokens: int) -> int:
    """Return the tokens divided by 8, rounded up to a compiled kernel."""
    return next(count for count in (1, 2, 4, 8) if num_tokens <= 8 * count)


def linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    *,
    epilogue: int,
    num_tokens: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    normed: Tensor | None = None,
    grid: LaunchGrid | None = None,
    walk: Walk | None = None,
    alone: bool = False,
) -> None:
    """Compute ``y = x W^T (+ bias)``, then ``epilogue``.

    Args:
        out: fp32 for STORE and ADD. bf16 ``[., N / 2]`` for SWIGLU of paired rows.
        x: bf16, with columns padded to whole tiles with zeros. A grid reads 8, 16, 32 or 64 rows.
            With ``norm``, fp32 ``[1, K]``. Rows of ``x`` and the weight are aligned to 16 bytes.
        packed: the weight.
        epilogue: STORE, ADD or SWIGLU.
        num_tokens: the used rows of x.
        bias: fp32 ``[N]``.
        norm: RMSNorm before the matmul (weight fp32, eps), for a single token up to
            `MAX_NORM_COLUMNS`.
        normed: bf16 ``[1, K]``, padded with zeros. Also receives the norm.
        grid: launch sizes for several tokens. None: automatic.
        walk: launch sizes for a single read of the weight. None: automatic.
        alone: the next kernel starts after this kernel.
    """
    assert 1 <= num_tokens <= most_tokens(packed) and packed.num_columns % 4 == 0
    assert x.data_ptr() % 16 == 0 == packed.data.data_ptr() % 16
    assert num_tokens == 1 or x.stride(0) % 8 == 0
    product = product_arguments(out, packed, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.x, product.x_stride, product.alone = x.data_ptr(), x.stride(0), alone
    if norm is not None:
        product.norm, product.eps = norm[0].data_ptr(), norm[1]
    assert norm is None or num_tokens == 1
    assert normed is None or (norm is not None and leaves_norm(packed))
    walk = walk or (None if grid else choose_walk(packed, num_tokens))
    if walk is not None:
        assert num_tokens == 1 or num_slices(packed) > 1
        _launch_gemv(product, packed, walk, normed)
        return
    grid = grid or choose_grid(packed, num_tokens)
    _launch_gemm(product, packed, grid, _token_groups(num_tokens))


def product_arguments(
    out: Tensor, packed: PackedWeight, *, epilogue: int, num_tokens: int, bias: Tensor | None
) -> MatmulParams:
    """Arguments of a matmul kernel, without its input."""
    product = MatmulParams(
        weight=packed.data.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_tokens=num_tokens,
        num_rows=packed.num_rows,
        num_columns=packed.num_columns,
        num_tiles=packed.num_row_tiles,
        num_steps=packed.num_column_tiles,
        num_slices=num_slices(packed),
        out_stride=out.stride(0),
        epilogue=epilogue,
        scale=MatmulScale(all=packed.scale * _UNITS.get(packed.format, 1.0)),
    )
    if packed.second_scales is not None:
        product.scale.rows = packed.second_scales.data_ptr()
    return product


def _launch_gemv(
    product: MatmulParams, weight: PackedWeight, walk: Walk, normed: Tensor | None
) -> None:
    """Launch the resident blocks. Each block processes row tiles in turn."""
    num_blocks = walk.blocks_each * num_processors(weight.data.device)
    shared = walk.shared_bytes(weight.format, weight.num_column_tiles)
    at = nvrtc.Launch((min(weight.num_row_tiles, num_blocks), 1, 1), _NUM_THREADS, shared)
    arguments: MatmulParams | _Leaving = product
    if normed is not None:
        assert normed.dtype == torch.bfloat16 and normed.data_ptr() % 8 == 0
        arguments = _Leaving(product, normed.data_ptr())
    name = walk.kernel(weight.format, leaves=normed is not None)
    nvrtc.launch(source_of(weight.format), name, at=at, arguments=arguments)


def _launch_gemm(
    product: MatmulParams, weight: PackedWeight, grid: LaunchGrid, groups: int
) -> None:
    """Launch a block for each run of row tiles and each slice of K, for ``groups * 8`` tokens."""
    slices = num_slices(weight)
    at = nvrtc.Launch(
        (-(-weight.num_row_tiles // grid.tiles_per_block), slices, 1),
        32 * grid.num_warps,
        grid.shared_bytes(weight, groups),
        cluster=(1, slices, 1),
    )
    nvrtc.launch(
        source_of(weight.format), grid.kernel(weight.format, groups), at=at, arguments=product
    )


class _NormParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "out")),
        *((name, ctypes.c_int) for name in ("num_columns", "x_stride", "out_stride")),
        ("eps", ctypes.c_float),
    )


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float, num_tokens: int) -> None:
    """Normalize ``x`` fp32 into ``out`` bf16, with the bits of the norm in :func:`linear`."""
    assert (x.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    arguments = _NormParams(
        x=x.data_ptr(),
        norm=weight.data_ptr(),
        out=out.data_ptr(),
        num_columns=weight.numel(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        eps=eps,
    )
    at = nvrtc.Launch((num_tokens, 1, 1), _NUM_THREADS)
    nvrtc.launch(source(), "rms_norm", at=at, arguments=arguments, spread=True)


def kernel_names(text: str) -> tuple[str, ...]:
    """Return the kernel names in the last lines of a source."""
    made = re.findall(r"^(GEM[VM]|LEAVES)\((\w+), \w+, ([\d, ]+)\)", text, re.M)
    return tuple(
        f"{macro.lower()}_{kind}_{sizes.replace(', ', '_')}" for macro, kind, sizes in made
    )


@functools.cache
def source() -> nvrtc.KernelSource:
    """Return `gemv.cu`."""
    path = Path(__file__).with_name("gemv.cu")
    names = (*kernel_names(path.read_text()), "rms_norm")
    return nvrtc.KernelSource(
        path, names, _HEADERS, (("Product", MatmulParams), ("Leaving", _Leaving))
    )


@functools.cache
def coded_source() -> nvrtc.KernelSource:
    """Return `gemv_coded.cu`."""
    path = Path(__file__).with_name("gemv_coded.cu")
    return nvrtc.KernelSource(
        path, kernel_names(path.read_text()), _HEADERS, (("Product", MatmulParams),)
    )


def source_of(format_name: str) -> nvrtc.KernelSource:
    """Return the source with a format's kernels."""
    return coded_source() if format_name in CODED else source()
