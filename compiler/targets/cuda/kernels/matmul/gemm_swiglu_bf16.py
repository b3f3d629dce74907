"""Launcher for gemm_swiglu_bf16.cu: matmul with SwiGLU for large batches and bfloat16 weights.

Excludes operand sources.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_bf16
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import (
    CHUNK_BYTES,
    TensorMap,
    has_room,
    map_of,
    num_chunks,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemv import (
    SWIGLU,
    MatmulParams,
    product_arguments,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAX_TOKENS = 4096
"""Maximum tokens of a launch. The L2 cache has no space for a larger x."""

MIN_TOKENS = 65
"""Minimum tokens, because blocks have at least 128."""

_SIDE, _WHOLE_TOKENS = 128, 256
_FIXED_BYTES = 512  # shared memory for barriers
_ALIGNMENT = 1024  # of a block's chunks, in bytes
_TUNING = tuning()["matmul"]["many"]
_MIN_ROWS: int = _TUNING["min_out_features"]
_MIN_SHARE: float = _TUNING["min_share"]
_SMALL_TURNS: int = _TUNING["few_turns"]
_MIN_SMALL_SHARE: float = _TUNING["min_share_of_few_turns"]


class _GemmSwiGLU(ctypes.Structure):
    """C++ `GemmSwiGLU`."""

    _fields_ = (
        *((name, TensorMap) for name in ("weight", "x", "out")),
        ("product", MatmulParams),
        *((name, ctypes.c_int) for name in ("num_chunks", "depth", "num_blocks")),
        ("rest", ctypes.c_uint64 * 2),
    )


@dataclass(frozen=True, slots=True)
class SwiGLUTileConfig:
    """Tile sizes for a launch.

    Attributes:
        eights: Tokens per block, divided by 8. If ``turned``, rows.
        columns: Blocks along the tokens.
        rows: Blocks along the weight's rows. ``columns`` or ``rows`` is even.
        turns: Maximum number of blocks of rows in turn per launched block.
        turned: Blocks have 128 tokens. False: blocks have 128 rows.
    """

    eights: int
    columns: int
    rows: int
    turns: int
    turned: bool = False

    @property
    def shares_rows(self) -> bool:
        """Return whether a cluster's blocks have the same rows, else the same tokens."""
        return self.turned and self.columns % 2 == 0

    @property
    def kernel(self) -> str:
        """Return the kernel's name."""
        if not self.turned:
            return f"gemm_swiglu_{self.eights}"
        return f"turned_{'rows' if self.shares_rows else 'tokens'}_{self.eights}"

    @property
    def block(self) -> tuple[int, int]:
        """Return weight rows and tokens per block."""
        return (8 * self.eights, _SIDE) if self.turned else (_SIDE, 8 * self.eights)

    @property
    def depth(self) -> int:
        """Return the 128-byte chunks in flight."""
        room = nvrtc.MOST_SHARED - _FIXED_BYTES - _ALIGNMENT - self._made_bytes
        return room // self._chunk_bytes

    @property
    def shared_bytes(self) -> int:
        """Return a block's dynamic shared memory: aligned chunks, and results."""
        return _ALIGNMENT + self.depth * self._chunk_bytes + self._made_bytes

    @property
    def _chunk_bytes(self) -> int:
        return sum(self.block) * CHUNK_BYTES

    @property
    def _made_bytes(self) -> int:
        return 0 if self.turned else 8 * self.eights * CHUNK_BYTES


_PATH = Path(__file__).with_name("gemm_swiglu_bf16.cu")

MADE = tuple(
    (kind == "TURNED", int(eights))
    for kind, eights in re.findall(r"^(GEMM_SWIGLU|TURNED)\((\d+)\)", _PATH.read_text(), re.M)
)
"""``turned`` and ``eights`` for each kernel in gemm_swiglu_bf16.cu."""

SOURCE = nvrtc.KernelSource(
    _PATH,
    tuple(
        {
            SwiGLUTileConfig(eights, columns, 2, 1, turned).kernel: None
            for turned, eights in MADE
            for columns in (1, 2)
        }
    ),
    headers=(
        *("primitives.cuh", "matrix_unit.cuh", "tiles.cuh", "arrange.cuh", "finish.cuh"),
        "gemm_bf16.cuh",
    ),
    structures=(("TensorMap", TensorMap), ("Product", MatmulParams), ("GemmSwiGLU", _GemmSwiGLU)),
)


@functools.lru_cache(maxsize=4096)
def choose_way(num_rows: int, num_tokens: int, processors: int) -> SwiGLUTileConfig:
    """Return the tile sizes with the minimum work in turn per block."""
    sizes = num_rows, num_tokens, processors
    return min(
        (way_of(eights, *sizes, turned=turned) for turned, eights in MADE),
        key=lambda way: (way.turns * way.eights, way.turned, -way.eights),
    )


@functools.cache
def rows_of(num_rows: int, processors: int) -> tuple[range, ...]:
    """Return the token counts of a launch: large weights, and a busy device."""
    if num_rows < _MIN_ROWS:
        return ()
    counts = range(MIN_TOKENS, MAX_TOKENS + 1)
    taken = [_fills_device(num_rows, count, processors) for count in counts]
    edges = [
        count
        for count, before, now in zip(counts, (False, *taken), taken, strict=False)
        if before != now
    ]
    edges += [MAX_TOKENS + 1] * (len(edges) % 2)
    return tuple(range(*pair) for pair in zip(edges[::2], edges[1::2], strict=True))


def launches_of(num_tokens: int) -> Iterator[slice]:
    """Yield the tokens of each launch: about equal numbers, in whole tiles."""
    size = -(-num_tokens // -(-num_tokens // MAX_TOKENS))
    size = min(MAX_TOKENS, -(-size // _WHOLE_TOKENS) * _WHOLE_TOKENS)
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))


def _fills_device(num_rows: int, num_tokens: int, processors: int) -> bool:
    way = choose_way(num_rows, -(-num_tokens // 8) * 8, processors)  # blocks are whole eights
    done = num_rows * max(num_tokens, gemm_bf16.MAX_TOKENS)
    share = done / (way.turns * math.prod(way.block) * processors)
    is_small = not way.turned and way.columns == 1 and way.turns == _SMALL_TURNS
    return share >= (_MIN_SMALL_SHARE if is_small else _MIN_SHARE)


def swiglu(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    packed: PackedWeight,
    *,
    bias: Tensor | None = None,
    way: SwiGLUTileConfig | None = None,
    alone: bool = False,
) -> None:
    """Multiply and apply SwiGLU. All rows are aligned to 16 bytes.

    Args:
        out: bfloat16 ``[M, N / 2]``.
        x: bfloat16 ``[M, K]``.
        weight: bfloat16 ``[N, K]``, the values in ``packed`` with the same pairs. The kernel reads
            it before the previous kernel ends, so that kernel must not write it.
        packed: the packed weight.
        bias: ``[N]``, also in pairs.
        way: tile sizes. None: automatic.
        alone: see :func:`.gemv.linear`.
    """
    num_tokens, processors = len(x), num_processors(out.device)
    assert packed.is_paired and has_room(out) and out.dtype == x.dtype == weight.dtype
    way = way or choose_way(packed.num_rows, num_tokens, processors)
    product = product_arguments(out, packed, epilogue=SWIGLU, num_tokens=num_tokens, bias=bias)
    product.alone, product.scale.all = alone, 1.0  # these are the values themselves
    rows, tokens = way.block
    arguments = _GemmSwiGLU(
        weight=map_of(weight[: packed.num_rows], rows // 2 if way.shares_rows else rows),
        x=map_of(x, tokens if way.shares_rows else tokens // 2),
        product=product,
        num_chunks=num_chunks(packed.num_columns),
        depth=way.depth,
        num_blocks=-(-packed.num_rows // rows),
    )
    if not way.turned:
        arguments.out = map_of(out[:, : packed.num_rows // 2], tokens)
    cluster = (2, 1, 1) if way.shares_rows else (1, 2, 1)
    at = nvrtc.Launch((way.columns, way.rows, 1), 288, way.shared_bytes, cluster=cluster)
    nvrtc.launch(SOURCE, way.kernel, at=at, arguments=arguments)


def way_of(
    eights: int, num_rows: int, num_tokens: int, processors: int, *, turned: bool = False
) -> SwiGLUTileConfig:
    """Return the tile sizes for ``eights``. All blocks are resident concurrently."""
    rows, tokens = SwiGLUTileConfig(eights, 1, 1, 1, turned).block
    columns = -(-num_tokens // tokens)
    together = 1 if turned and columns % 2 == 0 else 2  # blocks along the rows per cluster
    runs = -(-num_rows // (together * rows))
    turns = -(-runs // max(1, processors // columns // together))
    return SwiGLUTileConfig(eights, columns, together * -(-runs // turns), turns, turned)
