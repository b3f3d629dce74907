"""linear.cu on the device: which of its kernels takes a product, and how it is cut into blocks.

Knows nothing of where its operands come from.
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
    TILE_BYTES,
    PackedWeight,
    tile_bytes,
)

MAX_TOKENS = 64
MAX_NORM_COLUMNS = 8192
STORE, ADD, SWIGLU = 0, 1, 2

MOST_SHARED = nvrtc.MOST_SHARED - 2048
"""Bytes of dynamic shared memory that a block takes at most: what kernels fix is less."""

_KEPT = 3072  # bytes a block: what the device and kernels keep

UNCUT_TILES = 1024
"""Row tiles from which on a weight's K is not cut."""

_HEADERS = ("primitives.cuh", "tiles.cuh", "norm.cuh", "gemv.cuh", "gemm.cuh")
_SLICES = 8
CODED = ("q40", "q80", "fp8")
"""Formats of `linear_coded.cu`."""

LIKE = dict(zip(CODED, ("bfp4", "bfp8", "bfp8"), strict=True))
"""Formats with the tuning values of a block format with tiles of about the same size."""

_UNITS = {"q40": 64.0, "q80": 64.0}
"""What `decode_pair` of `tiles.cuh` divides codes by."""

STEP_BYTES = {"bf16": 4096, **TILE_BYTES} | {name: tile_bytes(name) for name in CODED}
X_PADDING = 8
_CODED_X_PADDING = 32
_NUM_THREADS = 256


class Product(ctypes.Structure):
    """`Product` of linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "norm", "bias", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_columns")),
        *((name, ctypes.c_int) for name in ("num_tiles", "num_steps", "num_slices")),
        *((name, ctypes.c_int) for name in ("x_stride", "out_stride", "epilogue")),
        *((name, ctypes.c_int) for name in ("places", "alone")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Leaving(ctypes.Structure):
    """`Leaving` of linear.cu."""

    _fields_ = (("product", Product), ("normed", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Walk:
    """How a product of few tokens goes over its weight: steps of 128 columns in flight a warp,
    blocks a multiprocessor; eights of tokens, 0 for a single token.
    """

    depth: int
    blocks_each: int
    groups: int = 0

    def kernel(self, kind: str, *, leaves: bool = False) -> str:
        """The name of the kernel that walks so over a weight of ``kind``; ``leaves``: and leaves
        its norm to others.
        """
        return (
            f"leaves_{kind}_{self.depth}" if leaves else f"gemv_{kind}_{self.groups}_{self.depth}"
        )

    def shared_bytes(self, kind: str, num_steps: int) -> int:
        """Dynamic shared memory of a block, for so many steps of x."""
        x_bytes = num_steps * 256
        if self.groups:
            x_bytes = self.groups * 8 * (x_bytes + 2 * x_padding(kind))
        return x_bytes + 8 * self.depth * STEP_BYTES[kind]

    def has_room(self, kind: str, num_steps: int) -> bool:
        """Whether so many blocks fit a multiprocessor, which keeps 1 KB of each for itself."""
        fixed = max(1, self.groups * 8) * 1024 + 1024  # of slices' sums, and the norm's
        each = self.shared_bytes(kind, num_steps) + fixed + 1024
        return self.blocks_each * each <= nvrtc.MOST_SHARED + 1024


@dataclass(frozen=True, slots=True)
class LaunchGrid:
    """How a product of several tokens lies on the device: warps a block, row tiles a warp, steps in
    flight.
    """

    num_warps: int
    tiles_per_warp: int
    depth: int

    @property
    def tiles_per_block(self) -> int:
        return self.num_warps * self.tiles_per_warp

    def kernel(self, kind: str, groups: int) -> str:
        """The kernel's name, for ``groups`` eights of tokens."""
        return f"gemm_{kind}_{groups}_{self.tiles_per_warp}_{self.depth}"

    def shared_bytes(self, packed: PackedWeight, groups: int) -> int:
        """Dynamic shared memory of a block, for ``groups`` eights of tokens."""
        x_bytes = groups * 8 * (128 + x_padding(packed.format)) * 2
        shared = self.depth * (x_bytes + self.tiles_per_block * STEP_BYTES[packed.kind])
        partials = groups * 8 * (self.tiles_per_block * 16 + 8) * 4
        return max(shared, partials if num_slices(packed) > 1 else 0)


def x_padding(format_name: str) -> int:
    """Return the padding columns for rows of x in shared memory."""
    return _CODED_X_PADDING if format_name in CODED else X_PADDING


def room_of(num_resident: int) -> int:
    """Bytes of dynamic shared memory of each of so many blocks of a multiprocessor."""
    return (MOST_SHARED + 2048) // num_resident - _KEPT


def takes_norm(num_columns: int) -> bool:
    """Whether norms of so many columns run here."""
    return num_columns <= MAX_NORM_COLUMNS and num_columns % 4 == 0


def leaves_norm(packed: PackedWeight) -> bool:
    """Whether one token's product with a weight can leave the norm that it makes to others."""
    return packed.kind == "bf16" and takes_norm(packed.num_columns)


def num_slices(packed: PackedWeight) -> int:
    """Into how many slices K is cut: a property of the weight, so that no result depends on the
    batch. A large weight gives all warps on the device different rows.
    """
    return 1 if packed.num_row_tiles >= UNCUT_TILES else _SLICES


def room_for(num_rows: int) -> int:
    """Rows that buffers have for steps of so many: kernels read whole eights of them."""
    return max(num_rows, MAX_TOKENS)


def most_tokens(packed: PackedWeight) -> int:
    """The most tokens of a product here; with more, the library's is faster for bfloat16."""
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
"""Of one token: the first that has room. Measured in whole models on an H200: one block a
multiprocessor is as fast in a chain of one shape, and a tenth to a half slower in a model."""

_FEW_DEPTH: dict[str, int] = _tuned("few_depth")
"""Of 2 to 16 tokens, by one block a multiprocessor."""


def choose_walk(packed: PackedWeight, num_tokens: int = 1) -> Walk | None:
    """How so few tokens' product with a weight goes; None where they take a grid."""
    kind, steps = packed.kind, packed.num_column_tiles
    if num_tokens == 1:
        walks = _WALKS[kind]
        return next((walk for walk in walks if walk.has_room(kind, steps)), walks[-1])
    if num_tokens > 16 or not _walks_well(packed, num_tokens):
        return None
    walk = Walk(_FEW_DEPTH[kind], 1, _token_groups(num_tokens))
    assert walk.has_room(kind, steps)
    return walk


def _walks_well(packed: PackedWeight, num_tokens: int) -> bool:
    """Whether a walk of a cut weight was measured faster than a grid, for 4, 8 and 16 tokens on an
    H200: bfloat16 in a whole model, block formats in chains of one shape. With more columns the
    copies of x before the first product cost more than they save.
    """
    if num_slices(packed) == 1:
        return False
    is_short = packed.num_column_tiles <= _SHORT_STEPS
    if packed.kind == "bf16" and num_tokens <= 8:
        return is_short or (packed.num_column_tiles <= 32 and packed.num_row_tiles <= 128)
    return is_short and (packed.kind != "bf16" or packed.num_row_tiles > _FEW_TILES)


_GRIDS = {
    kind: {
        int(eights): tuple(LaunchGrid(*sizes) for sizes in grids) for eights, grids in each.items()
    }
    for kind, each in _tuned("grids").items()
}
"""Of several tokens, by eights of them: for few rows of few columns and of more, for more rows, and
for an uncut weight.

Measured on an H200. A cut weight's eight blocks are a cluster within a group of 16 or 18
multiprocessors: blocks of eight warps fill the device on paper, and in fact wait for a place.
"""

_FEW_TILES: int = _GEMV["few_tiles"]
_SHORT_STEPS: int = _GEMV["short_steps"]
_FEW_COLUMNS: int = _GEMV["few_columns"]


def choose_grid(packed: PackedWeight, num_tokens: int) -> LaunchGrid:
    """The blocks of a product of several tokens."""
    few_short, few_long, some, many = _GRIDS[packed.kind][_token_groups(num_tokens)]
    if num_slices(packed) == 1:
        return many
    if packed.num_row_tiles > _FEW_TILES:
        return some
    return few_short if packed.num_columns <= _FEW_COLUMNS else few_long


def _token_groups(num_tokens: int) -> int:
    """Eights of tokens, as kernels are made for."""
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
    """``y = x W^T (+ bias)``, then ``epilogue``: STORE y in ``out`` fp32, ADD it there, or SWIGLU
    of paired rows into ``out`` bf16 [., N / 2].

    ``x`` bf16, columns padded to whole tiles with zeros, of which a grid reads 8, 16, 32 or 64
    rows; with ``norm`` (weight fp32, eps), which takes one token of at most 8,192 columns, fp32
    [1, K]; ``normed``, bf16 [1, K] padded with zeros, gets that norm, too. Rows of ``x`` and the
    weight begin at multiples of 16 bytes. ``alone``: the next kernel begins when this one has
    ended.
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
) -> Product:
    """Arguments of a matmul kernel, without its input."""
    return Product(
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
        scale=packed.scale * _UNITS.get(packed.format, 1.0),
    )


def _launch_gemv(product: Product, weight: PackedWeight, walk: Walk, normed: Tensor | None) -> None:
    """Few tokens: as many blocks as are resident, each walking over row tiles."""
    num_blocks = walk.blocks_each * num_processors(weight.data.device)
    at = nvrtc.Launch(
        (min(weight.num_row_tiles, num_blocks), 1, 1),
        _NUM_THREADS,
        walk.shared_bytes(weight.format, weight.num_column_tiles),
    )
    arguments: Product | _Leaving = product
    if normed is not None:
        assert normed.dtype == torch.bfloat16 and normed.data_ptr() % 8 == 0
        arguments = _Leaving(product, normed.data_ptr())
    name = walk.kernel(weight.format, leaves=normed is not None)
    nvrtc.launch(source_of(weight.format), name, at=at, arguments=arguments)


def _launch_gemm(product: Product, weight: PackedWeight, grid: LaunchGrid, groups: int) -> None:
    """Several tokens, ``groups`` eights of them: a block a run of row tiles and slice of K."""
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
    """``x`` fp32 to ``out`` bf16, with the bits of the norm inside :func:`linear`."""
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
    """The products that linear.cu's last lines ask for, by name."""
    made = re.findall(r"^(GEM[VM]|LEAVES)\((\w+), \w+, ([\d, ]+)\)", text, re.M)
    return tuple(
        f"{macro.lower()}_{kind}_{sizes.replace(', ', '_')}" for macro, kind, sizes in made
    )


@functools.cache
def source() -> nvrtc.KernelSource:
    """The source of linear.cu, with the names of its kernels and the headers it includes."""
    path = Path(__file__).with_name("linear.cu")
    names = (*kernel_names(path.read_text()), "rms_norm")
    return nvrtc.KernelSource(path, names, _HEADERS, (("Product", Product), ("Leaving", _Leaving)))


@functools.cache
def coded_source() -> nvrtc.KernelSource:
    """Return `linear_coded.cu`."""
    path = Path(__file__).with_name("linear_coded.cu")
    return nvrtc.KernelSource(
        path, kernel_names(path.read_text()), _HEADERS, (("Product", Product),)
    )


def source_of(format_name: str) -> nvrtc.KernelSource:
    """Return the source with a format's kernels."""
    return coded_source() if format_name in CODED else source()
