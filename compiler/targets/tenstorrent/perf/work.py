"""Work for an instruction on one chip: operations and bytes, not seconds.

Depends on the boards' geometry (banks, grid, tiles, ring steps) and on how the vendor's kernels
distribute work. ``constants.py`` has rates and latencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.compiler.devices import BLACKHOLE, get_device
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.mesh import ROWS
from tilewright.compiler.ops.moe import expected_experts
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    DRAM,
    AllGather,
    CausalConv,
    DeviceProgram,
    ExpertMatmul,
    Matmul,
    ReduceScatter,
    RmsNorm,
    Route,
    TtAllReduce,
    TtAttention,
    TtDeltaRule,
    TtEmbedding,
    TtInstruction,
    TtValue,
    class_name,
    tile_bytes,
)
from tilewright.compiler.targets.tenstorrent.program.placement import GRID

NUM_CORES = GRID * GRID
DELTA_GRID_ROWS = 10
"""Rows of cores for prompts in the vendor's Gated DeltaNet demo on Blackhole. Documented."""
MAX_CORES_PER_HEAD = 16
"""Maximum number of cores for one user's key/value head in ttnn's decode attention."""

_STARTS: Mapping[type[TtInstruction], int] = {Route: 5, CausalConv: 2, TtDeltaRule: 3}
"""Number of operators that the vendor's demos run for an instruction."""
_HEAD_NORM_STARTS = 3
"""Operators for a norm over heads in decode, with its two layout changes."""

MATMUL, ATTENTION, SMALL, COLLECTIVE = "matmul", "attention", "small", "collective"
FUSED_GATHER_CHIPS = 8


@dataclass(frozen=True, slots=True)
class InstructionCost:
    """Work for one instruction on one chip.

    Attributes:
        kind: Cost formula: ``matmul``, ``attention``, ``small`` or ``collective``.
        phases: Fidelity phases for a tile product.
        products: Tile products (32 x 32 x 32) on the busiest core.
        softmax_tiles: Score tiles on the busiest core.
        bytes_read: Bytes read from DRAM, for weights and caches.
        activation_bytes: Bytes for operands and results.
        ring_steps: Steps that pass partial sums to the next chip.
        hops: Steps without a sum.
        is_two_axes: The mesh has two axes.
        link_bytes: Bytes sent over each link.
        flops: Multiplications and additions, without padding.
        is_one_row: The matmul has one row of tiles. The readers of the DRAM banks compute it.
        is_spread: Activations are interleaved in DRAM. False: they are in L1.
        format: Format of the weight or the cache.
        starts: Operators that run.
        num_heads: Key heads of a user in a decode step's attention.
        head_tiles: Score tiles of a head there.
        banks: DRAM banks that hold a matmul's weight.
    """

    kind: str
    name: str
    group: str
    phases: int = 0
    products: int = 0
    softmax_tiles: int = 0
    bytes_read: int = 0
    activation_bytes: int = 0
    ring_steps: int = 0
    hops: int = 0
    is_two_axes: bool = False
    link_bytes: int = 0
    flops: int = 0
    is_one_row: bool = False
    is_spread: bool = False
    has_bias: bool = False
    format: str = ""
    starts: int = 1
    num_heads: int = 0
    head_tiles: int = 0
    banks: int = 0

    def score_tiles(self, num_cores: int) -> int:
        """Return the score tiles on the busiest of a user's cores. Cores do not share a head."""
        return -(-self.num_heads // num_cores) * self.head_tiles


def program_work(
    program: DeviceProgram, *, attended: int | None = None
) -> tuple[InstructionCost, ...]:
    """Return the work for every instruction, in order.

    Args:
        attended: Context positions in a decode step. None: the cache capacity. Ignored in prefill,
            because a prompt attends to itself only.
    """
    attended = program.context if attended is None else attended
    grid_rows = _grid_rows(program)
    producers: dict[int, TtInstruction] = {}
    known: dict[
        int, InstructionCost
    ] = {}  # a program may contain the same instruction several times
    for instruction in program.instructions:
        if id(instruction) not in known:
            producers[id(instruction.out)] = instruction
            known[id(instruction)] = _work(
                instruction, program, attended, producers, grid_rows=grid_rows
            )
    return tuple(known[id(instruction)] for instruction in program.instructions)


def _work(
    instruction: TtInstruction,
    program: DeviceProgram,
    attended: int,
    producers: dict[int, TtInstruction],
    *,
    grid_rows: int,
) -> InstructionCost:
    if isinstance(instruction, Matmul):
        return _matmul(instruction, grid_rows)
    if isinstance(instruction, TtAttention):
        return _attention(instruction, program, attended)
    if isinstance(instruction, ReduceScatter | AllGather | TtAllReduce):
        return _collective(instruction, program, producers.get(id(instruction.x)))
    if isinstance(instruction, ExpertMatmul):
        return _expert_matmul(instruction)
    moved = _operand_bytes(instruction)
    hops = bytes_read = 0
    starts = _STARTS.get(type(instruction), 1)
    if isinstance(instruction, RmsNorm) and instruction.num_heads and program.phase == DECODE:
        starts = _HEAD_NORM_STARTS
    if isinstance(instruction, TtDeltaRule):
        bytes_read = 2 * instruction.memory.num_bytes
    if isinstance(instruction, RmsNorm) and instruction.x.over:
        hops = program.mesh.size(instruction.x.over) // 2  # sums of squares, a tile from every chip
    if isinstance(instruction, TtEmbedding):
        bytes_read = instruction.out.num_bytes
    return InstructionCost(
        SMALL,
        class_name(instruction),
        "",
        bytes_read=bytes_read,
        activation_bytes=moved,
        hops=hops,
        is_spread=instruction.out.memory.buffer == DRAM,
        starts=starts,
    )


def hit_experts(num_experts: int, num_rows: int, top_k: int, num_chips: int) -> float:
    """Return the expected selected expert count on the busiest chip.

    Rows select experts at random. The excess over the mean assumes independent chips.
    """
    mean = expected_experts(num_experts, num_rows, top_k) / num_chips
    if num_chips == 1:
        return mean
    spread = math.sqrt(mean * (1 - mean * num_chips / num_experts) * (1 - 1 / num_chips))
    return min(num_experts / num_chips, mean + spread * math.sqrt(2 * math.log(num_chips) / 1.5))


def _expert_matmul(matmul: ExpertMatmul) -> InstructionCost:
    weight = matmul.weight
    num_chips = matmul.num_experts // weight.num_experts
    hit = hit_experts(matmul.num_experts, matmul.x.rows, matmul.top_k, num_chips)
    a_matrix = weight.tiles[0] * weight.tiles[1]
    rows = max(1.0, matmul.x.tiles[0] * matmul.top_k / matmul.num_experts)
    return InstructionCost(
        MATMUL,
        "ExpertMatmul",
        matmul.group,
        phases=matmul.compute.num_phases,
        products=math.ceil(hit * math.ceil(rows) * a_matrix / NUM_CORES),
        bytes_read=int(hit * a_matrix * tile_bytes(weight.format)),
        activation_bytes=matmul.x.num_bytes + matmul.out.num_bytes,
        flops=2 * matmul.x.rows * matmul.top_k * weight.rows * weight.columns,
        is_spread=True,
        format=weight.format,
    )


def _grid_rows(program: DeviceProgram) -> int:
    """Return the rows of cores that share a prompt's rows in a matmul."""
    has_delta_rule = any(isinstance(item, TtDeltaRule) for item in program.instructions)
    on_blackhole = get_device(program.device).architecture == BLACKHOLE
    return DELTA_GRID_ROWS if has_delta_rule and on_blackhole else GRID


def _matmul(matmul: Matmul, grid_rows: int) -> InstructionCost:
    rows, _ = matmul.x.tiles
    k_tiles, n_tiles = matmul.weight.tiles
    if rows == 1:
        products = -(-k_tiles * n_tiles // matmul.weight.memory.cores)
    else:
        products = -(-rows // grid_rows) * -(-n_tiles // GRID) * k_tiles
    return InstructionCost(
        MATMUL,
        "Matmul",
        matmul.group,
        phases=matmul.compute.num_phases,
        products=products,
        bytes_read=matmul.weight.num_bytes,
        activation_bytes=matmul.x.num_bytes + matmul.out.num_bytes,
        flops=2 * matmul.x.rows * matmul.weight.rows * matmul.weight.columns,
        is_one_row=rows == 1,
        banks=matmul.weight.memory.cores,
        is_spread=matmul.out.memory.buffer == DRAM,
        has_bias=matmul.bias is not None,
        format=matmul.weight.format,
    )


def _attention(attention: TtAttention, program: DeviceProgram, attended: int) -> InstructionCost:
    """Return the work for attention.

    In decode, a few cores share a head's positions. In prefill, the grid shares the query rows, and
    the cores in a grid row read the keys once.
    """
    depth = -(-attention.head_dim // TILE)
    pair = tile_bytes(attention.keys.format) + tile_bytes(attention.values.format)
    if program.phase == DECODE:
        context = min(attended, attention.window or attended)
        # The kernel starts at the chunk with the first position of the window.
        hidden = (attended - context) // attention.k_chunk * attention.k_chunk
        chunks = -(-(attended - hidden) // TILE)
        heads = program.batch * attention.num_kv_heads
        cores = min(MAX_CORES_PER_HEAD, max(1, NUM_CORES // heads))
        softmax = -(-heads * cores // NUM_CORES) * -(-chunks // cores)
        read = heads * chunks * depth * pair
        pairs = program.batch * context
    else:
        rows = -(-program.length // TILE)
        reach = -(-attention.window // TILE) + 1 if attention.window else rows
        tiles = sum(min(row + 1, reach) for row in range(rows))
        softmax, chunks = -(-attention.num_heads * tiles // NUM_CORES), 0
        read = attention.num_heads * tiles * depth * pair // GRID
        reach = attention.window or program.length
        pairs = sum(min(position + 1, reach) for position in range(program.length))
    return InstructionCost(
        ATTENTION,
        "Attention",
        "kv_cache",
        phases=attention.compute.num_phases,
        products=2 * depth * softmax,
        softmax_tiles=softmax,
        num_heads=attention.num_kv_heads,
        head_tiles=chunks,
        bytes_read=read,
        activation_bytes=attention.q.num_bytes + attention.out.num_bytes,
        flops=4 * attention.num_heads * pairs * attention.head_dim,
        is_spread=attention.out.memory.buffer == DRAM,
        format=attention.keys.format,
    )


def _collective(
    collective: ReduceScatter | AllGather | TtAllReduce,
    program: DeviceProgram,
    producer: TtInstruction | None,
) -> InstructionCost:
    """Return the work for a collective on a ring.

    A sum takes one sequential step for every other chip. A gather sends half the data in both
    directions at the same time, over half the ring.

    The vendor's attention output matmul on eight chips gathers its input inside the matmul. It
    needs no sum afterwards if a chip's columns are whole grid rows.
    """
    count = program.mesh.size(collective.axis)
    is_gather = isinstance(collective, AllGather) or _is_fused(collective, program, producer)
    is_both = isinstance(collective, TtAllReduce)
    value: TtValue = collective.out if isinstance(collective, AllGather) else collective.x
    moved = value.num_bytes * (count - 1) // count * (2 if is_both else 1)
    return InstructionCost(
        COLLECTIVE,
        class_name(collective),
        "",
        ring_steps=0 if is_gather else count - 1,
        hops=count // 2 if is_gather or is_both else 0,
        link_bytes=moved if count == 2 else moved // 2,
        is_two_axes=program.mesh.columns > 1,
    )


def _is_fused(
    collective: TtInstruction, program: DeviceProgram, producer: TtInstruction | None
) -> bool:
    if not isinstance(collective, ReduceScatter):
        return False
    is_output = isinstance(producer, Matmul) and producer.group == "wo"
    count = program.mesh.size(ROWS)
    columns = collective.x.tiles[1] // count
    return is_output and count == FUSED_GATHER_CHIPS and columns % GRID == 0


def _operand_bytes(instruction: TtInstruction) -> int:
    """Return the activation bytes read and written, in whole tiles."""
    names = ("x", "y", "gate", "up", "k", "v")
    values = [getattr(instruction, name, None) for name in names]
    inner = sum(value.num_bytes for value in values if isinstance(value, TtValue))
    return inner + instruction.out.num_bytes
