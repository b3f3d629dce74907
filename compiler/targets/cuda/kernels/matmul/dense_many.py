"""dense_many.cu on the device: SwiGLU of products of more than 64 tokens with bfloat16 rows.

Knows nothing of where its operands come from.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors
from tilewright.compiler.targets.cuda.kernels.matmul import dense as native_dense
from tilewright.compiler.targets.cuda.kernels.matmul.dense import (
    CHUNK_BYTES,
    TensorMap,
    has_room,
    map_of,
    num_chunks,
)
from tilewright.compiler.targets.cuda.kernels.matmul.linear import (
    SWIGLU,
    Product,
    product_arguments,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAX_TOKENS = 4096
"""The most tokens of a product here: of more, the second-level cache does not hold x."""

MIN_TOKENS = 65
"""The fewest that are worth it: blocks have at least 128."""

_SIDE = 128
_FIXED_BYTES = 512  # of shared memory: barriers
_TUNING = tuning()["matmul"]["many"]
_MIN_ROWS: int = _TUNING["min_out_features"]
_MIN_SHARE: float = _TUNING["min_share"]
_FEW_TURNS: int = _TUNING["few_turns"]
_SHARE_OF_FEW: float = _TUNING["min_share_of_few_turns"]


class _Many(ctypes.Structure):
    """`Many` of dense_many.cu."""

    _fields_ = (
        *((name, TensorMap) for name in ("weight", "x", "out")),
        ("product", Product),
        *((name, ctypes.c_int) for name in ("num_chunks", "depth", "num_blocks")),
        ("rest", ctypes.c_uint64 * 2),
    )


@dataclass(frozen=True, slots=True)
class SwiGLUTileConfig:
    """How a product lies on the device: blocks of 128 rows by ``eights`` of tokens, or ``turned``,
    of 128 tokens by so many rows; ``columns`` of them along the tokens and ``rows`` of them along
    the weight's rows, each of which walks over up to ``turns`` blocks of these. One of both is
    even.
    """

    eights: int
    columns: int
    rows: int
    turns: int
    turned: bool = False

    @property
    def shares_rows(self) -> bool:
        """Whether the two blocks of a cluster have the same rows, else the same tokens."""
        return self.turned and self.columns % 2 == 0

    @property
    def kernel(self) -> str:
        """The name of the kernel that goes so."""
        if not self.turned:
            return f"many_{self.eights}"
        return f"turned_{'rows' if self.shares_rows else 'tokens'}_{self.eights}"

    @property
    def block(self) -> tuple[int, int]:
        """Rows of the weight and tokens of a block."""
        return (8 * self.eights, _SIDE) if self.turned else (_SIDE, 8 * self.eights)

    @property
    def depth(self) -> int:
        """Chunks of 128 bytes of K in flight."""
        room = nvrtc.MOST_SHARED - _FIXED_BYTES - 1024 - self._made_bytes
        return room // self._chunk_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: chunks, which begin at a multiple of 1,024, and what it
        has made.
        """
        return 1024 + self.depth * self._chunk_bytes + self._made_bytes

    @property
    def _chunk_bytes(self) -> int:
        return sum(self.block) * CHUNK_BYTES

    @property
    def _made_bytes(self) -> int:
        return 0 if self.turned else 8 * self.eights * CHUNK_BYTES


_PATH = Path(__file__).with_name("dense_many.cu")

MADE = tuple(
    (kind == "TURNED", int(eights))
    for kind, eights in re.findall(r"^(MANY|TURNED)\((\d+)\)", _PATH.read_text(), re.M)
)
"""The blocks that dense_many.cu's last lines ask for: whether they are turned, and eights."""

SOURCE = nvrtc.KernelSource(
    _PATH,
    tuple(
        {
            SwiGLUTileConfig(eights, columns, 2, 1, turned).kernel: None
            for turned, eights in MADE
            for columns in (1, 2)
        }
    ),
    headers=("primitives.cuh", "matrix_unit.cuh", "tiles.cuh", "finish.cuh", "dense.cuh"),
    structures=(("TensorMap", TensorMap), ("Product", Product), ("Many", _Many)),
)


@functools.lru_cache(maxsize=4096)
def choose_way(num_rows: int, num_tokens: int, processors: int) -> SwiGLUTileConfig:
    """The way on which blocks take the fewest turns over a device, for what each of them takes."""
    sizes = num_rows, num_tokens, processors
    return min(
        (way_of(eights, *sizes, turned=turned) for turned, eights in MADE),
        key=lambda way: (way.turns * way.eights, way.turned, -way.eights),
    )


@functools.cache
def rows_of(num_rows: int, processors: int) -> tuple[range, ...]:
    """Return the token counts for this kernel: weights are large, and blocks leave little of the
    device idle.
    """
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


def _fills_device(num_rows: int, num_tokens: int, processors: int) -> bool:
    way = choose_way(num_rows, -(-num_tokens // 8) * 8, processors)  # blocks are whole eights
    done = num_rows * max(num_tokens, native_dense.MAX_TOKENS)
    share = done / (way.turns * math.prod(way.block) * processors)
    is_few = not way.turned and way.columns == 1 and way.turns == _FEW_TURNS
    return share >= (_SHARE_OF_FEW if is_few else _MIN_SHARE)


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
    """SwiGLU ``out [M, N / 2]`` bfloat16 of ``x [M, K]`` bfloat16 and the rows ``weight [N, K]``
    bfloat16 of what ``packed`` holds, paired as there; all three begin rows at multiples of 16
    bytes. The weight is read before what the kernel before writes is there: it must be there
    already. ``bias [N]``: paired, too; ``alone``: as :func:`.native.linear` has it.
    """
    num_tokens, processors = len(x), num_processors(out.device)
    assert packed.is_paired and has_room(out) and out.dtype == x.dtype == weight.dtype
    way = way or choose_way(packed.num_rows, num_tokens, processors)
    product = product_arguments(out, packed, epilogue=SWIGLU, num_tokens=num_tokens, bias=bias)
    product.alone, product.scale = alone, 1.0  # these are the values themselves
    rows, tokens = way.block
    arguments = _Many(
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
    """The way of blocks of so many eights of tokens, or ``turned``, of rows: all of a turn are on
    the device at once.
    """
    rows, tokens = SwiGLUTileConfig(eights, 1, 1, 1, turned).block
    columns = -(-num_tokens // tokens)
    together = 1 if turned and columns % 2 == 0 else 2  # blocks of rows of a cluster
    runs = -(-num_rows // (together * rows))
    turns = -(-runs // max(1, processors // columns // together))
    return SwiGLUTileConfig(eights, columns, together * -(-runs // turns), turns, turned)
