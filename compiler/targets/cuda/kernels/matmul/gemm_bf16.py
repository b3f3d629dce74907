"""Launcher for gemm_bf16.cu: matmuls of 5 to 128 tokens with bfloat16 weights.

Excludes operand sources.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    MOST_SHARED,
    MatmulParams,
    product_arguments,
    room_of,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAX_TOKENS = 128
"""Maximum tokens. For larger batches, cuBLAS is as fast."""

MAX_SMALL_M = 4
"""Maximum tokens for the small kernels, which are batch-invariant."""

CHUNK_BYTES = 128
"""Bytes of K per copy."""

GROUP_ROWS = 64
"""Weight rows for four warps."""

_EIGHTS = (2, 4, 8, 16)
_MOST_DEPTH = 12
_MOST_SLICES = 8
_LEAST_SLICE: int = tuning()["matmul"]["dense"]["min_slice_bytes"]  # bytes of K
_TUNING = tuning()["matmul"]["dense"]
# Minimum slices for two blocks per multiprocessor. The next kernel can then copy weights early.
_MIN_SLICES_OF_SMALL: int = _TUNING["min_slices_of_small"]
_MIN_LARGE_TURNS: int = _TUNING["many_turns"]
# Turns of small blocks over the device, below which blocks may have 256 rows.
_MOST_TURNS: int = _TUNING["most_turns"]
_SOME_TOKENS: int = _TUNING["some_tokens"]
_LONG_COLUMNS: int = _TUNING["long_columns"]


class TensorMap(ctypes.Structure):
    """C++ `TensorMap`: the location of rows for the copy engine."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Dense(ctypes.Structure):
    """C++ `Dense`."""

    _fields_ = (
        *((name, TensorMap) for name in ("weight", "x")),
        ("product", MatmulParams),
        *((name, ctypes.c_int) for name in ("num_chunks", "depth", "num_blocks")),
        ("padding", ctypes.c_int * 5),
    )


@dataclass(frozen=True, slots=True)
class DenseTileConfig:
    """Tile sizes for a launch.

    Attributes:
        eights: Tokens per block, divided by 8.
        groups: Groups of 64 rows per block.
        slices: Slices of K, a power of two. Their blocks are a cluster, with a single group each.
        resident: Blocks per multiprocessor.
    """

    eights: int
    groups: int
    slices: int = 1
    resident: int = 1

    @property
    def kernel(self) -> str:
        """Return the kernel's name."""
        return f"dense_bf16_{self.eights}_{self.groups}"

    @property
    def depth(self) -> int:
        """Return the 128-byte chunks in flight."""
        return min(_MOST_DEPTH, room_of(self.resident) // self._chunk_bytes)

    @property
    def shared_bytes(self) -> int:
        """Return a block's dynamic shared memory, for chunks aligned to 1,024 bytes or for sums."""
        sums = self.groups * self.eights * 2048 if self.slices > 1 else 0
        return max(self.depth * self._chunk_bytes + 1024, sums)

    @property
    def _chunk_bytes(self) -> int:
        return (GROUP_ROWS * self.groups + 8 * self.eights) * CHUNK_BYTES


def choose_way(packed: PackedWeight, num_tokens: int) -> DenseTileConfig:
    """Return the tile sizes with the best measured or expected speed."""
    eights = next(size for size in _EIGHTS if num_tokens <= 8 * size)
    count, turns = num_processors(packed.data.device), _turns(packed)
    if turns > 1:
        if eights < 8:
            groups = 1
        else:
            most = _MOST_TURNS if eights == 8 else turns
            groups = 4 if _MIN_LARGE_TURNS <= turns <= most else 2
        return DenseTileConfig(eights, groups, resident=2 if groups == 1 else 1)
    tiles = -(-packed.num_rows // GROUP_ROWS)
    num_bytes, slices = 2 * packed.num_columns, 1
    while 2 * slices * tiles <= count and num_bytes >= 2 * slices * _LEAST_SLICE:
        slices *= 2
    is_small = slices >= _MIN_SLICES_OF_SMALL and eights < 16
    return DenseTileConfig(eights, 1, min(slices, _MOST_SLICES), resident=2 if is_small else 1)


def rows_of(packed: PackedWeight) -> range:
    """Return the token counts for this kernel with a bfloat16 weight.

    An H200 ran these counts faster than the small kernels and cuBLAS: in whole models, or above 64
    tokens in chains of matmuls.
    """
    if packed.kind != "bf16" or packed.num_experts > 1:
        return range(0)
    is_large = _MIN_LARGE_TURNS <= _turns(packed) <= _MOST_TURNS
    is_large = is_large or packed.num_columns > _LONG_COLUMNS
    return range(MAX_SMALL_M + 1, (MAX_TOKENS if is_large else _SOME_TOKENS) + 1)


def takes_turns(packed: PackedWeight) -> bool:
    """Return whether a weight takes several turns on the device."""
    return _turns(packed) >= _MIN_LARGE_TURNS


def num_chunks(num_columns: int) -> int:
    """Return the chunks for the columns. The last chunk is padded with zeros."""
    return -(-num_columns * 2 // CHUNK_BYTES)


def has_room(x: Tensor) -> bool:
    """Return whether rows are aligned to 16 bytes, for the copy engine and 16-byte reads."""
    return x.data_ptr() % 16 == 0 == x.stride(0) * x.element_size() % 16


def _turns(packed: PackedWeight) -> float:
    """Return the turns of small blocks over the device."""
    return -(-packed.num_rows // GROUP_ROWS) / num_processors(packed.data.device)


_PATH = Path(__file__).with_name("gemm_bf16.cu")

MADE = tuple(
    (int(eights), int(groups))
    for eights, groups in re.findall(r"^DENSE\((\d+), (\d+)\)", _PATH.read_text(), re.M)
)
"""Eights and groups for the kernels in gemm_bf16.cu."""

SOURCE = nvrtc.KernelSource(
    _PATH,
    tuple(DenseTileConfig(eights, groups).kernel for eights, groups in MADE),
    headers=(
        "primitives.cuh",
        "matrix_unit.cuh",
        "tiles.cuh",
        "arrange.cuh",
        "finish.cuh",
        "gemm_bf16.cuh",
    ),
    structures=(("TensorMap", TensorMap), ("Product", MatmulParams), ("Dense", Dense)),
)


def linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    *,
    epilogue: int,
    bias: Tensor | None = None,
    way: DenseTileConfig | None = None,
    feeds: int = 0,
    alone: bool = False,
) -> None:
    """Run :func:`.gemv.linear` for ``x [M, K]`` in bfloat16, with up to 128 rows.

    Rows are aligned to 16 bytes. ``feeds``: see :func:`.gemm_block.linear`.
    """
    num_tokens = len(x)
    way = way or choose_way(packed, num_tokens)
    product = product_arguments(out, packed, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.places, product.alone = feeds, alone
    arguments = Dense(
        weight=map_of(packed.data, GROUP_ROWS * way.groups),
        x=map_of(x, 8 * way.eights),
        product=product,
        num_chunks=num_chunks(packed.num_columns),
        depth=way.depth,
    )
    assert num_tokens <= MAX_TOKENS and way.shared_bytes <= MOST_SHARED and way.depth > 1
    arguments.num_blocks = -(-packed.num_rows // (GROUP_ROWS * way.groups))
    most = way.resident * num_processors(out.device) if way.slices == 1 else arguments.num_blocks
    turns = -(-arguments.num_blocks // most)
    blocks = 1, -(-arguments.num_blocks // turns), way.slices
    threads = 128 * way.groups + 32
    assert num_tokens <= 8 * way.eights and 1 in (way.groups, way.slices)
    assert way.slices in (1, 2, 4, 8)
    at = nvrtc.Launch(blocks, threads, way.shared_bytes, cluster=(1, 1, way.slices))
    nvrtc.launch(SOURCE, way.kernel, at=at, arguments=arguments)


def map_of(rows: Tensor, box_rows: int) -> TensorMap:
    """Return a tensor map for ``rows [N, K]`` in bfloat16 or codes, see :func:`has_room`. A box has
    ``box_rows`` rows of 128 bytes.
    """
    size = rows.element_size()
    assert rows.stride(1) == 1 and has_room(rows)
    return _map(rows.data_ptr(), *rows.shape, rows.stride(0) * size, box_rows, size == 1)


@functools.lru_cache(maxsize=4096)
def _map(
    address: int, num_rows: int, num_columns: int, row_bytes: int, box_rows: int, is_codes: bool
) -> TensorMap:
    """Return a tensor map with 128-byte boxes. Bytes past the rows read as zero."""
    from cuda.bindings import driver

    types, size = driver.CUtensorMapDataType, 1 if is_codes else 2
    kind = types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    if is_codes:
        kind = types.CU_TENSOR_MAP_DATA_TYPE_UINT8
    made = nvrtc.check(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [driver.cuuint64_t(num_columns), driver.cuuint64_t(num_rows)],
            [driver.cuuint64_t(row_bytes)],
            [driver.cuuint32_t(CHUNK_BYTES // size), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(int(made.getPtr()), 128))
