"""Launcher for gemm_block.cu: matmuls of 17 to 512 tokens with weights in block formats.

Excludes operand sources.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import TensorMap
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    ADD,
    CODED,
    LIKE,
    MOST_SHARED,
    SLICES,
    STEP_BYTES,
    SUMMED,
    MatmulParams,
    num_slices,
    product_arguments,
    room_of,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES, PackedWeight

MAX_TOKENS = 512
"""Maximum tokens of a launch."""

_TUNING = tuning()["matmul"]["block"]
_MOST_CUT: int = _TUNING["max_cut_rows"]
_MIN_SPLIT: int = _TUNING["min_split_rows"]
# Row tiles of a small weight whose K is not split above `_MOST_CUT` rows.
_LEAST_WHOLE: int = _TUNING["min_whole_tiles"]
# Weights with this number of values run up to `_MAX_LARGE` tokens in several launches, in bfp8 and
# bfp4. For other sizes above `MAX_TOKENS`, cuBLAS with dequantized weights is as fast.
_MIN_LARGE: int = _TUNING["min_large_values"]
_MAX_LARGE: int = _TUNING["max_large_rows"]
_MOST_PLACES = 576  # MAX_TOKENS in whole blocks
_MAX_SMALL_TILES: int = _TUNING["many_tiles"]
_CHUNK = 64
MAX_DEPTH = 12
"""Maximum steps in flight."""


@dataclass(frozen=True, slots=True)
class BlockTileConfig:
    """Tile sizes for a launch.

    Attributes:
        eights: Tokens per block, divided by 8.
        groups: Groups of four warps per block, with 64 rows per group. If K is split, all groups
            have the same rows and different slices.
        resident: Blocks per multiprocessor.
        joined: Blocks that divide the slices.
        is_whole: Do not split K. A weight with a split K gets other bits.
    """

    eights: int
    groups: int
    resident: int = 1
    joined: int = 1
    is_whole: bool = False

    def kernel(self, packed: PackedWeight) -> str:
        """Return the kernel's name."""
        if self.joined > 1:
            return f"joined_{packed.kind}_{self.eights}_{self.joined}"
        kind = "cut" if self._is_cut(packed) else "gemm_block"
        return f"{kind}_{packed.kind}_{self.eights}_{self.groups}"

    def row_tiles(self, packed: PackedWeight) -> int:
        """Return the row tiles per block."""
        return 4 if self._is_cut(packed) else 4 * self.groups

    def depth(self, packed: PackedWeight) -> int:
        """Return the 128-column steps in flight."""
        return min(MAX_DEPTH, room_of(self.resident) // self._step_bytes(packed))

    def shared_bytes(self, packed: PackedWeight) -> int:
        """Return a block's dynamic shared memory, for steps aligned to 1,024 bytes or for sums of
        slices.
        """
        is_shared = self._is_cut(packed) and self.groups > 1
        sums = num_slices(packed) // self.joined * self.eights * 2048 if is_shared else 0
        return max(self.depth(packed) * self._step_bytes(packed) + 1024, sums)

    def _is_cut(self, packed: PackedWeight) -> bool:
        return num_slices(packed) > 1 and not self.is_whole

    def _step_bytes(self, packed: PackedWeight) -> int:
        rings = self.groups * 4 // self.row_tiles(packed)
        return rings * (self.eights * 2048 + self.row_tiles(packed) * STEP_BYTES[packed.kind])


WAYS = {
    "gemm_block": ((4, 2), (8, 2), (16, 2), (24, 2)),
    "cut": ((4, 4), (8, 4), (8, 1)),
}
"""Eights and groups with kernels, for a whole K and for slices."""

_TOO_LARGE = (24, 2), (8, 4)
CODED_WAYS = {
    cut: tuple(way for way in ways if way not in _TOO_LARGE) for cut, ways in WAYS.items()
}
"""The same for sums of blocks, with more registers per tile."""


def ways_of(kind: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return a format's eights and groups."""
    return CODED_WAYS if kind in SUMMED else WAYS


JOINED = BlockTileConfig(8, 4, joined=2)
"""Tile sizes with two blocks for the slices of K."""

_MAX_SMALL_M = 64
_LINE = 128  # bytes


@dataclass(frozen=True, slots=True)
class SplitTileConfig:
    """Tile sizes for a launch of `gemm_split`. Its bits differ from :mod:`.gemv`.

    Attributes:
        eights: Tokens per block, divided by 8.
        groups: Groups of four warps per block.
        tiles: Tiles per block. A warp has a single tile.
        joined: Blocks that divide K. Their groups without tiles divide it further.
    """

    eights: int
    groups: int
    tiles: int
    joined: int = 1

    def kernel(self, packed: PackedWeight) -> str:
        """Return the kernel's name."""
        return f"split_{packed.kind}_{self.eights}_{self.groups}"

    @property
    def sets(self) -> int:
        """Return the sets of a block's groups. A set has all tiles, and takes steps in turn."""
        return self.groups // -(-self.tiles // 4) if self.joined > 1 else 1

    def depth(self, packed: PackedWeight) -> int:
        """Return the 128-column steps in flight.

        A multiple of the sets, so that a stage always belongs to the same set. A set releases its
        stage after its next step has arrived, so the depth must exceed the sets.
        """
        depth = min(MAX_DEPTH, room_of(1) // self._step_bytes(packed))
        return depth - depth % self.sets

    def shared_bytes(self, packed: PackedWeight) -> int:
        """Return a block's dynamic shared memory, for aligned steps or for sums."""
        sums = self.groups * self.eights * 2048 if self.joined > 1 else 0
        return max(self.depth(packed) * self._step_bytes(packed) + 1024, sums)

    def _step_bytes(self, packed: PackedWeight) -> int:
        return self.eights * 2048 + self.tiles * STEP_BYTES[packed.kind]


SPLIT = 4, 4
"""Eights and groups of `gemm_split`."""


def splits_of(packed: PackedWeight) -> range:
    """Return the token counts for `gemm_split`, measured in whole models on an H200."""
    return range(_MIN_SPLIT, 8 * SPLIT[0] + 1) if packed.format in TILE_BYTES else range(0)


def split_way(packed: PackedWeight) -> SplitTileConfig:
    """Return tile sizes for all multiprocessors. Two of them divide the K of a small weight."""
    eights, groups = SPLIT
    count, most, total = num_processors(packed.data.device), 4 * groups, packed.num_row_tiles
    joined = 2 if total <= count // 2 * most else 1
    turns = -(-total // (count // joined * most))
    tiles = -(-total // (turns * (count // joined)))
    return SplitTileConfig(eights, groups, tiles, joined)


_STEP_US = {
    BlockTileConfig(
        each["eights"], each["groups"], each["resident"], is_whole=each["is_whole"]
    ): each["us"]
    for each in _TUNING["step_us"]
}
"""Microseconds per 128 columns with blocks on the whole device. Measured with bfp8 on an H100 by
`python -m bench kernels`, for weights with 4,096 to 28,672 rows.
"""

_CODED_STEP_US = {BlockTileConfig(*sizes): us for *sizes, us in _TUNING["coded_step_us"]}


def choose_way(
    packed: PackedWeight, num_tokens: int, *, same_bits: bool = True
) -> BlockTileConfig | SplitTileConfig:
    """Return the tile sizes with the best measured or expected speed.

    ``same_bits``: a token's result has the bits of the small kernels, which split K.
    """
    if not same_bits and num_tokens in splits_of(packed):
        return split_way(packed)
    is_cut, is_summed = num_slices(packed) > 1, packed.format in SUMMED
    if num_tokens > _MAX_SMALL_M and not (is_cut and same_bits):
        if not is_cut and LIKE.get(packed.kind, packed.kind) == "bfp4" and not is_summed:
            return BlockTileConfig(16, 2, 2, is_whole=True)
        tiles, count = (packed.num_row_tiles, packed.num_column_tiles), num_tokens
        return _fastest(*tiles, count, is_cut, is_summed, num_processors(packed.data.device))
    is_large = packed.num_row_tiles > _MAX_SMALL_TILES
    if not is_cut:
        return BlockTileConfig(4 if num_tokens <= 32 else 8, 2, 2)
    if num_tokens <= 32:
        return BlockTileConfig(4, 4)
    if num_tokens <= _MAX_SMALL_M:
        return BlockTileConfig(8, 4) if is_large and not is_summed else JOINED
    if is_large and num_tokens > 128:
        return BlockTileConfig(8, 1, 3)
    return JOINED if is_summed else BlockTileConfig(8, 4)


@functools.lru_cache(maxsize=4096)
def _fastest(
    row_tiles: int,
    column_tiles: int,
    num_tokens: int,
    is_cut: bool,
    is_summed: bool,
    num_processors: int,
) -> BlockTileConfig:
    """Predict the fastest tile sizes: a round of blocks takes the same time for any number."""

    def expected(way: BlockTileConfig) -> float:
        tiles, own = (4 * way.groups, 1) if way.is_whole else (4, way.groups * way.joined)
        blocks = -(-row_tiles // tiles) * -(-num_tokens // (8 * way.eights)) * way.joined
        rounds = -(-blocks // (way.resident * num_processors))
        return rounds * column_tiles / own * step_us[way]

    step_us = _CODED_STEP_US if is_summed else _STEP_US
    return min((way for way in step_us if is_cut or way.is_whole), key=expected)


class _Arrange(ctypes.Structure):
    """C++ `Arrange`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_places", "num_columns", "x_stride")),
        ("is_coded", ctypes.c_int),
    )


class _ArrangeNorm(ctypes.Structure):
    """C++ `ArrangeNorm`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "out")),
        *((name, ctypes.c_int) for name in ("num_places", "num_columns", "x_stride", "padded")),
        ("is_coded", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class GemmBlock(ctypes.Structure):
    """Kernel arguments."""

    _fields_ = (
        ("product", MatmulParams),
        ("depth", ctypes.c_int),
    )


class _DeferredNorms(ctypes.Structure):
    """C++ `DeferredNorms`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("next_norm", "next_x", "next_squares", "squares")),
        *((name, ctypes.c_int) for name in ("next_places", "next_groups", "num_squares")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """A norm between two matmuls without its own kernel, see deferred_norm.cuh.

    The first matmul, with the ADD epilogue and a split K, writes x and squares. The second matmul
    reads them. Both have `SplitTileConfig`.

    Attributes:
        norm: Weight fp32 ``[K]``.
        eps: Epsilon.
        x: Residual times ``norm``, as scratch for :func:`linear`.
        squares: fp32 scratch with ``groups`` sums per token.
        groups: Groups of rows in the first matmul, see :func:`norm_groups_of`.
        places: Places in ``x``.
    """

    norm: Tensor
    eps: float
    x: Tensor
    squares: Tensor
    groups: int
    places: int


class _GemmSplit(ctypes.Structure):
    """C++ `GemmSplit`."""

    _fields_ = (
        ("weight", TensorMap),
        ("product", MatmulParams),
        ("norms", _DeferredNorms),
        *((name, ctypes.c_int) for name in ("depth", "tiles")),
        ("padding", ctypes.c_int * 10),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("gemm_block.cu"),
    (
        "arrange",
        "arrange_norm",
        *(
            f"{cut}_{fmt}_{eights}_{groups}"
            for fmt in TILE_BYTES
            for cut, ways in WAYS.items()
            for eights, groups in ways
        ),
        *(f"joined_{fmt}_{JOINED.eights}_{JOINED.joined}" for fmt in TILE_BYTES),
        *(f"split_{fmt}_{SPLIT[0]}_{SPLIT[1]}" for fmt in TILE_BYTES),
    ),
    headers=(
        "primitives.cuh",
        "matrix_unit.cuh",
        "tiles.cuh",
        "arrange.cuh",
        "finish.cuh",
        "deferred_norm.cuh",
        "norm.cuh",
        "gemm_block.cuh",
    ),
    structures=(
        ("Arrange", _Arrange),
        ("ArrangeNorm", _ArrangeNorm),
        ("Product", MatmulParams),
        ("GemmBlock", GemmBlock),
        ("TensorMap", TensorMap),
        ("DeferredNorms", _DeferredNorms),
        ("GemmSplit", _GemmSplit),
    ),
)


CODED_SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("block_coded.cu"),
    tuple(
        name
        for fmt in CODED
        for name in (
            *(f"{cut}_{fmt}_{m}_{n}" for cut, ways in ways_of(fmt).items() for m, n in ways),
            f"joined_{fmt}_{JOINED.eights}_{JOINED.joined}",
        )
    ),
    headers=tuple(name for name in SOURCE.headers if name != "norm.cuh"),
    structures=SOURCE.structures[2:4],
)


def rows_of(packed: PackedWeight, *, same_bits: bool = True) -> range:
    """Return the token counts for this kernel: measured faster on an H200.

    Above :func:`splits_of`, the minimum without ``same_bits`` is from an H100.
    """
    like = LIKE.get(packed.format, packed.format)
    if like not in TILE_BYTES or packed.num_experts > 1 or packed.num_columns % 4:
        return range(0)
    is_uncut = num_slices(packed) == 1
    is_early = like == "bfp8" if is_uncut else packed.num_row_tiles > _MAX_SMALL_TILES
    least = (16 if is_early else 32) + 1
    if not same_bits and (split := splits_of(packed)):
        least = min(least, split.start)
    is_large = packed.num_row_tiles >= _LEAST_WHOLE and not same_bits
    most = MAX_TOKENS if is_uncut or is_large else _MOST_CUT
    has_launches = most == MAX_TOKENS and not same_bits and packed.format in TILE_BYTES
    if has_launches and packed.num_rows * packed.num_columns >= _MIN_LARGE:
        most = _MAX_LARGE
    return range(least, most + 1)


def launches_of(num_tokens: int) -> list[slice]:
    """Return the tokens of each launch: equal sizes of whole 128 tokens, then the rest."""
    count = -(-num_tokens // MAX_TOKENS)
    size = -(-num_tokens // (128 * count)) * 128
    return [slice(at, min(at + size, num_tokens)) for at in range(0, num_tokens, size)]


def scratch(num_columns: int, device: torch.device) -> Tensor:
    """Return scratch memory for :func:`linear`, for weights up to ``num_columns``."""
    num_steps = -(-num_columns // 128)
    return torch.empty(_MOST_PLACES * num_steps * 256, dtype=torch.uint8, device=device)


def linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    *,
    epilogue: int,
    arranged: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    way: BlockTileConfig | SplitTileConfig | None = None,
    is_there: bool = False,
    feeds: int = 0,
    before: DeferredNorm | None = None,
    after: DeferredNorm | None = None,
    alone: bool = False,
) -> None:
    """Run :func:`.gemv.linear` for ``x [M, K]`` with up to `MAX_TOKENS` rows.

    The bits are equal, unless ``way`` is `SplitTileConfig` or leaves K unsplit. ``x`` is bfloat16,
    or fp32 with ``norm`` (weight fp32, eps).

    Args:
        out: as in :func:`.gemv.linear`.
        x: ``[M, K]``.
        packed: the weight.
        epilogue: as in :func:`.gemv.linear`.
        arranged: memory from :func:`scratch`, overwritten by x.
        bias: fp32 ``[N]``.
        norm: RMSNorm before the matmul.
        way: tile sizes. None: automatic.
        is_there: ``arranged`` already has x.
        feeds: :func:`num_places` for the next matmul, if ``out`` is its scratch. SWIGLU then has
            whole column tiles.
        before: the norm before `gemm_split`, deferred by the last matmul. Its x is ``arranged``.
        after: the norm after the ADD epilogue, to be deferred. Requires :func:`norm_groups_of`.
        alone: the next kernel starts after this kernel.
    """
    num_tokens = len(x)
    assert num_tokens <= MAX_TOKENS and x.stride(1) == 1 and packed.data.data_ptr() % 16 == 0
    way = way or choose_way(packed, num_tokens)
    places = num_places(way, num_tokens)
    steps = packed.num_column_tiles
    assert arranged.data_ptr() % 16 == 0 and arranged.numel() >= places * steps * 256
    if is_there:
        assert norm is None
    elif norm is None:
        _arrange(arranged, x, packed, places)
    else:
        _arrange_norm(arranged, x, packed, places, norm)
    product = product_arguments(out, packed, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.x, product.x_stride = arranged.data_ptr(), places
    product.places, product.alone = feeds, alone
    assert before is None or (is_there and before.places == places)
    assert after is None or after.groups == norm_groups_of(packed, way)
    assert after is None or after.x is not arranged, "other blocks still read x"
    if isinstance(way, SplitTileConfig):
        _launch_split(product, packed, way, _deferred_norms(product, before, after))
    else:
        assert before is None and after is None
        _launch(product, packed, way)


def norm_groups_of(packed: PackedWeight, way: BlockTileConfig | SplitTileConfig) -> int:
    """Return the groups of rows for a deferred norm after this matmul. 0: not supported."""
    if not isinstance(way, SplitTileConfig) or way.joined == 1:
        return 0
    return -(-packed.num_row_tiles // way.tiles) * -(-way.tiles // 4)


def num_places(way: BlockTileConfig | SplitTileConfig, num_tokens: int) -> int:
    """Return the token places in the layout of x, padding included."""
    return -(-num_tokens // (8 * way.eights)) * 8 * way.eights


def _arrange(out: Tensor, x: Tensor, packed: PackedWeight, num_places: int) -> None:
    assert x.dtype == torch.bfloat16 and x.stride(0) % 2 == 0 == x.data_ptr() % 4
    arguments = _Arrange(
        x=x.data_ptr(),
        out=out.data_ptr(),
        num_tokens=len(x),
        num_places=num_places,
        num_columns=packed.num_columns,
        x_stride=x.stride(0),
        is_coded=packed.format in CODED,
    )
    at = nvrtc.Launch((num_places // 32, packed.num_column_tiles * 128 // _CHUNK, 1), 256)
    nvrtc.launch(SOURCE, "arrange", at=at, arguments=arguments)


def _arrange_norm(
    out: Tensor, x: Tensor, packed: PackedWeight, num_places: int, norm: tuple[Tensor, float]
) -> None:
    assert x.dtype == torch.float32 and x.stride(0) % 4 == 0 == x.data_ptr() % 16
    arguments = _ArrangeNorm(
        x=x.data_ptr(),
        norm=norm[0].data_ptr(),
        out=out.data_ptr(),
        num_places=num_places,
        num_columns=packed.num_columns,
        x_stride=x.stride(0),
        padded=packed.num_column_tiles * 128,
        is_coded=packed.format in CODED,
        eps=norm[1],
    )
    nvrtc.launch(SOURCE, "arrange_norm", at=nvrtc.Launch((len(x), 1, 1), 256), arguments=arguments)


def _launch(product: MatmulParams, packed: PackedWeight, way: BlockTileConfig) -> None:
    """Launch blocks for all tokens concurrently. They share the weight reads."""
    shared, depth = way.shared_bytes(packed), way.depth(packed)
    assert shared <= MOST_SHARED and depth > 1
    row_blocks = -(-packed.num_row_tiles // way.row_tiles(packed))
    blocks = product.x_stride // (8 * way.eights), row_blocks, way.joined
    at = nvrtc.Launch(blocks, 128 * way.groups, shared, cluster=(1, 1, way.joined))
    arguments = GemmBlock(product=product, depth=depth)
    source = CODED_SOURCE if packed.format in CODED else SOURCE
    nvrtc.launch(source, way.kernel(packed), at=at, arguments=arguments)


def _deferred_norms(
    product: MatmulParams, before: DeferredNorm | None, after: DeferredNorm | None
) -> _DeferredNorms:
    """Return the arguments for deferred norms before and after a matmul."""
    norms = _DeferredNorms()
    if before is not None:
        norms.squares, norms.num_squares = before.squares.data_ptr(), before.groups
        norms.eps = before.eps
    if after is not None:
        assert product.epilogue == ADD and not product.bias and not product.places
        assert after.squares.numel() >= product.num_tokens * after.groups
        norms.next_norm, norms.next_x = after.norm.data_ptr(), after.x.data_ptr()
        norms.next_squares, norms.next_groups = after.squares.data_ptr(), after.groups
        norms.next_places = after.places
    return norms


def _launch_split(
    product: MatmulParams, packed: PackedWeight, way: SplitTileConfig, norms: _DeferredNorms
) -> None:
    """Launch blocks for all tokens. Without a split K, a block processes row tiles in turn."""
    shared, depth = way.shared_bytes(packed), way.depth(packed)
    assert shared <= MOST_SHARED and depth > way.sets
    assert way.joined in (1, 2) and way.joined * way.sets <= SLICES
    count = -(-packed.num_row_tiles // way.tiles)
    if way.joined == 1:
        count = min(count, num_processors(packed.data.device))
    blocks = product.x_stride // (8 * way.eights), count, way.joined
    at = nvrtc.Launch(blocks, 128 * way.groups + 32, shared, cluster=(1, 1, way.joined))
    weight = tile_map(packed, way.tiles)
    arguments = _GemmSplit(weight, product, norms, depth, way.tiles)
    nvrtc.launch(SOURCE, way.kernel(packed), at=at, arguments=arguments)


def tile_map(packed: PackedWeight, tiles: int) -> TensorMap:
    """Return a tensor map for a packed weight as lines. A box is a step of ``tiles`` tiles."""
    return _map(packed.data.data_ptr(), *packed.data.shape, tiles)


@functools.lru_cache(maxsize=4096)
def _map(address: int, count: int, steps: int, step_bytes: int, tiles: int) -> TensorMap:
    from cuda.bindings import driver

    lines = step_bytes // _LINE
    made = nvrtc.check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            3,
            address,
            [driver.cuuint64_t(size) for size in (_LINE, steps * lines, count)],
            [driver.cuuint64_t(size) for size in (_LINE, steps * step_bytes)],
            [driver.cuuint32_t(size) for size in (_LINE, lines, tiles)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(int(made.getPtr()), 128))
