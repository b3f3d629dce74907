"""A typed program of device instructions: what one step is on a mesh of chips.

Every chip of a mesh runs the same instructions on its own part of each value. Four readers take
it from here: the emulator, the ttnn emitter, the memory plan and the performance model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

from tilewright.compiler.formats import FIDELITIES, get_format
from tilewright.compiler.formats.block_float import TILE, BlockFloat
from tilewright.compiler.ir.info import WHOLE, Placement
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
    """Where a value lies on a chip: interleaved over banks, or cut over ``cores`` (L1) or banks
    (DRAM) by columns (width) or rows (height).
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
    """What a chip holds of one tensor: ``rows`` and ``columns`` are those of one chip.

    ``placement``: how its columns, axis 1, lie on the mesh, and over which of its axes (``r``,
    ``c``) the values must still be added, if any. Token ids and positions have format ``int32`` and
    are not tiled.
    """

    name: str
    rows: int
    columns: int
    format: str
    memory: Memory
    placement: Placement = WHOLE

    @property
    def over(self) -> str:
        """The mesh axis whose chips hold different columns; empty: every chip holds the same."""
        return self.placement.over(1)

    @property
    def split(self) -> Split | None:
        """How the columns are dealt over that axis; None where every chip has all of them."""
        return self.placement.split(1)

    @property
    def partial(self) -> str:
        """The mesh axis over which the values must still be added, if any."""
        return self.placement.partial

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of 32 x 32 tiles."""
        return -(-self.rows // TILE), -(-self.columns // TILE)

    @property
    def num_bytes(self) -> int:
        """The bytes on one chip, in whole tiles."""
        return tile_bytes(self.format) * self.tiles[0] * self.tiles[1]


@dataclass(frozen=True, slots=True)
class TtWeight:
    """A tensor of the checkpoint as a chip holds it: ``[in, out]`` = ``rows`` x ``columns``.

    ``placement``: how its axes, ``in`` (0) and ``out`` (1), lie on the mesh. Vectors
    (norms, biases) have one row. ``num_experts``: matrices on a chip, 0 for a plain weight. Experts
    are axis 2 of the placement. ``transposed``: the recipe's ``[out, in]`` becomes ``[in, out]``,
    blocks along out; tables and vectors are kept as they are.
    """

    name: str
    recipe: WeightRecipe
    rows: int
    columns: int
    format: str
    memory: Memory
    placement: Placement = WHOLE
    transposed: bool = True
    num_experts: int = 0

    @property
    def expert_over(self) -> str:
        """The mesh axis of its experts, if any."""
        return self.placement.over(EXPERTS)

    @property
    def expert_split(self) -> Split | None:
        """The experts of every chip."""
        return self.placement.split(EXPERTS)

    @property
    def in_over(self) -> str:
        """The mesh axis over which its rows are dealt, if any."""
        return self.placement.over(0)

    @property
    def in_split(self) -> Split | None:
        """How the rows of the weight are dealt over the mesh."""
        return self.placement.split(0)

    @property
    def out_over(self) -> str:
        """The mesh axis over which its columns are dealt, if any."""
        return self.placement.over(1)

    @property
    def out_split(self) -> Split | None:
        """How the columns of the weight are dealt over the mesh."""
        return self.placement.split(1)

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of 32 x 32 tiles, those added to fill the banks included."""
        columns = -(-self.columns // TILE)
        if self.memory.layout == WIDTH_SHARDED:
            columns = -(-columns // self.memory.cores) * self.memory.cores
        return -(-self.rows // TILE), columns

    @property
    def num_bytes(self) -> int:
        """The bytes on one chip, in whole tiles."""
        return tile_bytes(self.format) * self.tiles[0] * self.tiles[1] * max(1, self.num_experts)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys or values of a layer: pages of ``page`` positions, ``num_heads`` on a chip."""

    name: str
    state: StateSpec
    kind: str  # k or v
    num_heads: int
    head_dim: int
    format: str
    num_pages: int
    page: int
    placement: Placement = WHOLE

    @property
    def over(self) -> str:
        """The mesh axis over which its heads are dealt, if any."""
        return self.placement.over(1)

    @property
    def split(self) -> Split | None:
        """How the columns of its heads are dealt."""
        return self.placement.split(1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages on one chip."""
        tiles = self.num_pages * self.num_heads * (self.page // TILE) * -(-self.head_dim // TILE)
        return tile_bytes(self.format) * tiles


@dataclass(frozen=True, slots=True)
class TtSequenceState:
    """State of fixed size a sequence, in fp32: ``shape`` is that of a chip. ``over``: the mesh axis
    whose chips have different channels or heads.
    """

    name: str
    state: StateSpec
    shape: tuple[int, ...]
    num_slots: int
    over: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on one chip."""
        return 4 * self.num_slots * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """What ttnn calls a compute kernel configuration; ``name`` is the fidelity's."""

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
    """Return a class name without the prefix of this program, as in listings and results."""
    return type(value).__name__.removeprefix("Tt")


@dataclass(frozen=True, slots=True)
class TtInstruction:
    """``out`` is what it makes. ``fqn``, ``layer``: whose it is; layer None outside the layers."""

    out: TtValue
    fqn: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class TtEmbedding(TtInstruction):
    """Rows of a table by token: ``tokens`` int32, the table row-major in DRAM."""

    tokens: TtValue
    table: TtWeight


@dataclass(frozen=True, slots=True)
class RmsNorm(TtInstruction):
    """Over the columns of ``x``, ``width`` of which are real.

    Where ``x`` is dealt over a mesh axis, the sums of squares are gathered over it first (``x``'s
    ``over`` tells): the vendor's distributed norm. ``num_heads`` > 0: each head of a chip has its
    own norm, over ``width`` columns.
    """

    x: TtValue
    weight: TtWeight
    eps: float
    width: int
    compute: ComputeConfig
    num_heads: int = 0


@dataclass(frozen=True, slots=True)
class Matmul(TtInstruction):
    """``x @ weight``, plus a bias.

    ``k_block``: tiles of K the kernel reads and adds at a time. ``cores``: that share the work.
    ``group``: the tensor group, ``ff1_3`` and so on.
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
    """Q, K and V of one product's columns, head by head; ``out`` is Q, then ``k`` and ``v``."""

    x: TtValue
    k: TtValue
    v: TtValue
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Rotate(TtInstruction):
    """Rotary embedding of ``x``, ``num_heads`` heads, at ``positions``."""

    x: TtValue
    positions: TtValue
    frequencies: TtWeight
    num_heads: int
    head_dim: int
    interleaved: bool
    compute: ComputeConfig


@dataclass(frozen=True, slots=True)
class UpdateCache(TtInstruction):
    """``x``'s rows go to the cache's pages: a prompt's at once (fill), or one a user."""

    x: TtValue
    cache: Cache
    positions: TtValue


@dataclass(frozen=True, slots=True)
class TtAttention(TtInstruction):
    """Causal attention over the cache, by chunks of ``k_chunk`` positions, softmax going along.

    ``context``: positions attended to, the step's own included. ``sinks``: a logit of each head in
    the softmax, without a value.
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
    """Heads side by side again: ``[rows, num_heads * head_dim]``."""

    x: TtValue
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TtSwiGLU(TtInstruction):
    """The elementwise ``silu(gate) * up`` of two values."""

    gate: TtValue
    up: TtValue


@dataclass(frozen=True, slots=True)
class Gated(TtInstruction):
    """The elementwise ``activation(gate) * x``; ``activation``: ``gelu_tanh`` or ``sigmoid``.

    A gate of one column counts for all columns of ``x``.
    """

    gate: TtValue
    x: TtValue
    activation: str


@dataclass(frozen=True, slots=True)
class Scale(TtInstruction):
    """``x`` times a number, which the device holds in bfloat16."""

    x: TtValue
    factor: float


@dataclass(frozen=True, slots=True)
class Tanh(TtInstruction):
    """The hyperbolic tangent of each element."""

    x: TtValue


@dataclass(frozen=True, slots=True)
class Route(TtInstruction):
    """The ``top_k`` experts of each row of router logits: ``out`` has weights, ``experts`` indices.

    ``renormalize``: weights are a softmax over the selected logits, else over all.
    """

    x: TtValue
    experts: TtValue
    top_k: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ExpertMatmul(TtInstruction):
    """Products with the experts of each row, side by side: ``[rows, top_k * columns]``.

    ``x`` has a row for all experts of a token, or (``is_expanded``) columns for each. With
    ``weights`` the products are weighted and summed. K is a single block. A chip has whole
    experts; a product with an expert of another chip is zero.
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


@dataclass(frozen=True, slots=True)
class CausalConv(TtInstruction):
    """SiLU of a convolution along the sequence, each channel by itself, with its ``window``."""

    x: TtValue
    weight: TtWeight
    window: TtSequenceState
    positions: TtValue


@dataclass(frozen=True, slots=True)
class TtDeltaRule(TtInstruction):
    """The gated delta rule: heads of queries, keys and values in ``x``; gates ``a`` and ``b``."""

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
    """The sum of a value and the residual stream."""

    x: TtValue
    y: TtValue


@dataclass(frozen=True, slots=True)
class SelectRows(TtInstruction):
    """Take the rows that want logits."""

    x: TtValue


@dataclass(frozen=True, slots=True)
class ReduceScatter(TtInstruction):
    """Partial sums over a mesh axis are added, each chip keeping its share of the columns."""

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class AllGather(TtInstruction):
    """Each chip gets the columns of all along a mesh axis."""

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class TtAllReduce(TtInstruction):
    """Partial sums over a mesh axis are added, each chip keeping all columns."""

    x: TtValue
    axis: str


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """One step of ``batch`` users with ``length`` tokens each, ``context`` positions behind the
    last one included; ``phase`` is ``prefill`` or ``decode``.

    ``inputs``: tokens, positions. ``device``: the row of the device table.
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
        """Every weight once, in the order of use."""
        return self._operands(TtWeight)

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Every cache once, keys before values, layer by layer."""
        return self._operands(Cache)

    @property
    def states(self) -> tuple[TtSequenceState, ...]:
        """Every state of fixed size once."""
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
    """Bytes of a 32 x 32 tile in a format the boards have; ``int32`` besides."""
    if format_name == "int32":
        return 4 * TILE * TILE
    format_ = get_format(format_name)
    if isinstance(format_, BlockFloat):
        return format_.tile_nbytes(TILE, TILE)
    return int(format_.bits) * TILE * TILE // 8
