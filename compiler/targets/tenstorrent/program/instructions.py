"""A typed program: the device instructions for a step on a mesh.

Every chip runs the same instructions on its own shard of every value. The emulator, the ttnn
emitter, the memory plan and the performance model read this program.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

from tilewright.compiler.formats import FIDELITIES, get_format
from tilewright.compiler.formats.block_float import TILE, BlockFloat
from tilewright.compiler.ir.info import WHOLE, Sharding
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.mesh import Mesh, Split

DRAM, L1 = "dram", "l1"
INTERLEAVED, WIDTH_SHARDED, HEIGHT_SHARDED = "interleaved", "width_sharded", "height_sharded"
PREFILL, DECODE = "prefill", "decode"
EXPERTS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """A value's place in chip memory.

    Attributes:
        buffer: ``dram`` or ``l1``.
        layout: ``interleaved`` over all banks, ``width_sharded`` (by columns) or ``height_sharded``
            (by rows).
        cores: Shard count. L1 has one shard a core and DRAM has one shard a bank. 0: interleaved.
    """

    buffer: str = DRAM
    layout: str = INTERLEAVED
    cores: int = 0

    def __str__(self) -> str:
        if self.layout == INTERLEAVED:
            return self.buffer
        return f"{self.buffer}:{self.layout}/{self.cores}"


@dataclass(frozen=True, slots=True)
class TtValue:
    """A tensor in a step: its shape and format on one chip.

    Token ids and positions have the format ``int32`` and are not tiled.

    Attributes:
        rows, columns: Shape on one chip.
        placement: Mesh axis that shards the columns (axis 1), and the mesh axis (``r`` or ``c``)
            over which partial sums remain to be added.
    """

    name: str
    rows: int
    columns: int
    format: str
    memory: Memory
    placement: Sharding = WHOLE

    @property
    def over(self) -> str:
        """The mesh axis that shards the columns. Empty: every chip has all columns."""
        return self.placement.over(1)

    @property
    def split(self) -> Split | None:
        """The columns of every chip. None: every chip has all columns."""
        return self.placement.split(1)

    @property
    def partial(self) -> str:
        """The mesh axis over which partial sums remain to be added. Empty: none."""
        return self.placement.partial

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of 32 x 32 tiles along rows and columns."""
        return -(-self.rows // TILE), -(-self.columns // TILE)

    @property
    def num_bytes(self) -> int:
        """Size on one chip in bytes. Partial tiles count as whole tiles."""
        return tile_bytes(self.format) * self.tiles[0] * self.tiles[1]


@dataclass(frozen=True, slots=True)
class TtWeight:
    """A checkpoint tensor in a chip's layout: ``[in, out]``.

    Attributes:
        rows, columns: ``in`` and ``out`` on one chip. Norms and biases have one row.
        placement: Mesh axes that shard ``in`` (axis 0), ``out`` (axis 1) and the experts (axis 2).
        transposed: True: the recipe's ``[out, in]`` is stored as ``[in, out]``, with blocks along
            out. False for tables and vectors, which keep their layout.
        num_experts: Expert matrices on one chip. 0: a plain weight.
    """

    name: str
    recipe: WeightRecipe
    rows: int
    columns: int
    format: str
    memory: Memory
    placement: Sharding = WHOLE
    transposed: bool = True
    num_experts: int = 0

    @property
    def expert_over(self) -> str:
        """The mesh axis that shards the experts. Empty: none."""
        return self.placement.over(EXPERTS)

    @property
    def expert_split(self) -> Split | None:
        """The experts of every chip. None: every chip has all experts."""
        return self.placement.split(EXPERTS)

    @property
    def in_over(self) -> str:
        """The mesh axis that shards the rows. Empty: none."""
        return self.placement.over(0)

    @property
    def in_split(self) -> Split | None:
        """The rows of every chip. None: every chip has all rows."""
        return self.placement.split(0)

    @property
    def out_over(self) -> str:
        """The mesh axis that shards the columns. Empty: none."""
        return self.placement.over(1)

    @property
    def out_split(self) -> Split | None:
        """The columns of every chip. None: every chip has all columns."""
        return self.placement.split(1)

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of 32 x 32 tiles along rows and columns, with padding for the DRAM banks."""
        columns = -(-self.columns // TILE)
        if self.memory.layout == WIDTH_SHARDED:
            columns = -(-columns // self.memory.cores) * self.memory.cores
        return -(-self.rows // TILE), columns

    @property
    def num_bytes(self) -> int:
        """Size on one chip in bytes. Partial tiles count as whole tiles."""
        return tile_bytes(self.format) * self.tiles[0] * self.tiles[1] * max(1, self.num_experts)


@dataclass(frozen=True, slots=True)
class Cache:
    """Pages with the keys or the values for a layer.

    Attributes:
        kind: ``k`` or ``v``.
        num_heads: Key/value heads on one chip.
        page: Positions in a page.
    """

    name: str
    state: StateSpec
    kind: str
    num_heads: int
    head_dim: int
    format: str
    num_pages: int
    page: int
    placement: Sharding = WHOLE

    @property
    def over(self) -> str:
        """The mesh axis that shards the heads. Empty: every chip has all heads."""
        return self.placement.over(1)

    @property
    def split(self) -> Split | None:
        """The columns of every chip: its heads. None: every chip has all heads."""
        return self.placement.split(1)

    @property
    def num_bytes(self) -> int:
        """Size of all pages on one chip in bytes."""
        tiles = self.num_pages * self.num_heads * (self.page // TILE) * -(-self.head_dim // TILE)
        return tile_bytes(self.format) * tiles


@dataclass(frozen=True, slots=True)
class TtSequenceState:
    """State with a fixed size for every sequence, in fp32.

    Attributes:
        shape: Shape of one slot on one chip.
        num_slots: Maximum sequence count.
        over: The mesh axis that shards the channels or heads. Empty: none.
    """

    name: str
    state: StateSpec
    shape: tuple[int, ...]
    num_slots: int
    over: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of all slots on one chip in bytes."""
        return 4 * self.num_slots * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """A fidelity by name, called a compute kernel configuration in ttnn."""

    name: str

    @property
    def num_phases(self) -> int:
        return FIDELITIES[self.name].num_phases

    @property
    def fp32_dst(self) -> bool:
        return FIDELITIES[self.name].fp32_dest

    @property
    def l1_acc(self) -> bool:
        return FIDELITIES[self.name].packer_l1_acc

    @property
    def approx(self) -> bool:
        return FIDELITIES[self.name].approx


def class_name(value: object) -> str:
    """Return a class name without this program's prefix, as in listings and results."""
    return type(value).__name__.removeprefix("Tt")


@dataclass(frozen=True, slots=True)
class TtInstruction:
    """An instruction in a program.

    Attributes:
        out: The result.
        fqn: Module name in the model.
        layer: Layer index. None outside the layers.
    """

    out: TtValue
    fqn: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class TtEmbedding(TtInstruction):
    """Table lookup by token. ``tokens`` is int32 and ``table`` is row-major in DRAM."""

    tokens: TtValue
    table: TtWeight


@dataclass(frozen=True, slots=True)
class RmsNorm(TtInstruction):
    """RMS norm over the columns of ``x``.

    If ``x`` is sharded over a mesh axis, the chips exchange their sums of squares first (the
    vendor's distributed norm).

    Attributes:
        width: Columns in the mean, without padding.
        num_heads: Heads on one chip, each with its own norm over ``width`` columns. 0: one norm
            over all columns.
    """

    x: TtValue
    weight: TtWeight
    eps: float
    width: int
    compute: ComputeConfig
    num_heads: int = 0


@dataclass(frozen=True, slots=True)
class Matmul(TtInstruction):
    """``x @ weight``, with an optional bias.

    Attributes:
        k_block: K tiles in a block. The kernel adds a block at a time.
        cores: Cores that share the work.
        group: The weight's tensor group, for example ``ff1_3``.
    """

    x: TtValue
    weight: TtWeight
    bias: TtWeight | None
    compute: ComputeConfig
    k_block: int
    cores: int
    group: str


@dataclass(frozen=True, slots=True)
class CreateHeads(TtInstruction):
    """Separation from a merged Q, K and V result into heads. ``out`` is Q."""

    x: TtValue
    k: TtValue
    v: TtValue
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Rotate(TtInstruction):
    """Rotary embedding for the ``num_heads`` heads in ``x`` at ``positions``.

    Attributes:
        factor: Factor of cosines and sines, for YaRN.
    """

    x: TtValue
    positions: TtValue
    frequencies: TtWeight
    num_heads: int
    head_dim: int
    interleaved: bool
    compute: ComputeConfig
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class UpdateCache(TtInstruction):
    """Write from ``x`` to a cache's pages.

    Prefill writes all rows for one user. Decode writes one row for every user.
    """

    x: TtValue
    cache: Cache
    positions: TtValue


@dataclass(frozen=True, slots=True)
class TtAttention(TtInstruction):
    """Causal attention over the cache with an online softmax over chunks of ``k_chunk`` positions.

    Attributes:
        window: Sliding window in positions. 0: no window.
        context: Cache capacity in positions, with this step's positions.
        sinks: Logits ``[num_heads]`` that enter the softmax without a value.
    """

    q: TtValue
    keys: Cache
    values: Cache
    positions: TtValue
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    context: int
    k_chunk: int
    compute: ComputeConfig
    sinks: TtWeight | None = None


@dataclass(frozen=True, slots=True)
class ConcatHeads(TtInstruction):
    """The heads' concatenation: ``[rows, num_heads * head_dim]``."""

    x: TtValue
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TtSwiGLU(TtInstruction):
    """Elementwise ``silu(gate) * up``, or the clamped form of gpt-oss.

    Attributes:
        limit: Bound of gate and up in the clamped form, which adds 1 to ``up``. 0: no clamp.
        alpha: Factor inside the sigmoid.
    """

    gate: TtValue
    up: TtValue
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Gated(TtInstruction):
    """Elementwise ``activation(gate) * x``. ``activation`` is ``gelu_tanh`` or ``sigmoid``.

    A gate with a single column applies to all columns of ``x``.
    """

    gate: TtValue
    x: TtValue
    activation: str


@dataclass(frozen=True, slots=True)
class Scale(TtInstruction):
    """``x`` times ``factor``. The device rounds ``factor`` to bfloat16."""

    x: TtValue
    factor: float


@dataclass(frozen=True, slots=True)
class Tanh(TtInstruction):
    """The hyperbolic tangent of every element."""

    x: TtValue


@dataclass(frozen=True, slots=True)
class Route(TtInstruction):
    """Expert selection: the ``top_k`` experts for every row of router logits.

    ``out`` has the weights and ``experts`` has the indices.

    Attributes:
        renormalize: True: softmax over the selected logits. False: softmax over all logits.
    """

    x: TtValue
    experts: TtValue
    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ExpertMatmul(TtInstruction):
    """Matmuls with the experts selected by every row: ``[rows, top_k * columns]``.

    A chip has whole experts. The result for an expert on another chip is zero. K is a single block.

    Attributes:
        weights: Weights ``[rows, top_k]`` for a sum over the experts. None: no sum.
        is_expanded: ``x`` has different columns for each selected expert. False: all experts read
            the same row.
        bias: A vector for every expert, added to the bfloat16 result. None: no bias.
    """

    x: TtValue
    weight: TtWeight
    experts: TtValue
    weights: TtValue | None
    compute: ComputeConfig
    top_k: int
    num_experts: int
    is_expanded: bool
    cores: int
    group: str
    bias: TtWeight | None = None


@dataclass(frozen=True, slots=True)
class CausalConv(TtInstruction):
    """SiLU of a depthwise causal convolution along the sequence. ``window`` is its state."""

    x: TtValue
    weight: TtWeight
    window: TtSequenceState
    positions: TtValue


@dataclass(frozen=True, slots=True)
class TtDeltaRule(TtInstruction):
    """The gated delta rule. ``x`` has the queries, keys and values. ``a`` and ``b`` are the
    gates.
    """

    x: TtValue
    a: TtValue
    b: TtValue
    a_log: TtWeight
    dt_bias: TtWeight
    memory: TtSequenceState
    positions: TtValue
    num_key_heads: int
    key_dim: int
    num_value_heads: int


@dataclass(frozen=True, slots=True)
class Add(TtInstruction):
    """The sum of ``x`` and ``y``, which is the residual stream."""

    x: TtValue
    y: TtValue


@dataclass(frozen=True, slots=True)
class SelectRows(TtInstruction):
    """The rows with logits."""

    x: TtValue


@dataclass(frozen=True, slots=True)
class ReduceScatter(TtInstruction):
    """Partial values added over a mesh axis. Each chip stores its shard of the columns.

    Float32 values are added in float32, other values in the format of ``out``.
    """

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class AllGather(TtInstruction):
    """The columns from all chips along a mesh axis, on every chip."""

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class TtAllReduce(TtInstruction):
    """Partial values added as in `ReduceScatter`. Each chip stores all columns."""

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """One step with ``batch`` users and ``length`` tokens for every user.

    Attributes:
        device: Name in the device table.
        phase: ``prefill`` or ``decode``.
        context: Cache capacity for every user in positions.
        vocab_size: Logits without padding.
        inputs: Tokens and positions.
    """

    device: str
    mesh: Mesh
    phase: str
    batch: int
    length: int
    context: int
    vocab_size: int
    inputs: tuple[TtValue, ...]
    instructions: tuple[TtInstruction, ...]

    @property
    def weights(self) -> tuple[TtWeight, ...]:
        """Return every weight once, in first-use order."""
        return self._operands(TtWeight)

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Return every cache once, in layer order. Keys precede values."""
        return self._operands(Cache)

    @property
    def states(self) -> tuple[TtSequenceState, ...]:
        """Return every fixed-size state once."""
        return self._operands(TtSequenceState)

    def _operands(self, kind: type[T]) -> tuple[T, ...]:
        found: dict[T, None] = {}
        for instruction in self.instructions:
            for field in dataclasses.fields(instruction):
                operand = getattr(instruction, field.name)
                if isinstance(operand, kind):
                    found[operand] = None
        return tuple(found)


def tile_bytes(format_name: str) -> int:
    """Return the bytes in a 32 x 32 tile for a board format or ``int32``."""
    if format_name == "int32":
        return 4 * TILE * TILE
    format_ = get_format(format_name)
    if isinstance(format_, BlockFloat):
        return format_.tile_nbytes(TILE, TILE)
    return int(format_.bits) * TILE * TILE // 8
