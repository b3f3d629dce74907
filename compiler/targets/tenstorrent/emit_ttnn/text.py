"""The parts of an emitted ttnn file that are the same for every model: places, configurations and
weights.
"""

from __future__ import annotations

IMPORTS = """\
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import torch
    import ttnn
except ImportError as error:
    print(f"{error}; this file runs where ttnn 0.81 and torch are installed", file=sys.stderr)
    raise SystemExit(2) from None

TTNN = "0.81"
TILE = 32
GRID = 8  # worker cores along each side of a chip
DRAM, L1 = ttnn.DRAM_MEMORY_CONFIG, ttnn.L1_MEMORY_CONFIG
"""

PLACES = '''\
def rectangle(cores: int) -> ttnn.CoreRangeSet:
    rows = next(n for n in range(1, GRID + 1) if cores % n == 0 and cores // n <= GRID)
    return ranges(cores // rows, rows)


def ranges(columns: int, rows: int) -> ttnn.CoreRangeSet:
    end = ttnn.CoreCoord(columns - 1, rows - 1)
    return ttnn.CoreRangeSet({ttnn.CoreRange(ttnn.CoreCoord(0, 0), end)})


def sharded(layout, buffer, cores: ttnn.CoreRangeSet, shape: tuple[int, int]) -> ttnn.MemoryConfig:
    spec = ttnn.ShardSpec(cores, shape, ttnn.ShardOrientation.ROW_MAJOR)
    return ttnn.MemoryConfig(layout, buffer, spec)


def columns(width: int, cores: int) -> ttnn.MemoryConfig:
    """One tile of rows in L1, cut by columns over so many cores."""
    layout = ttnn.TensorMemoryLayout.WIDTH_SHARDED
    return sharded(layout, ttnn.BufferType.L1, rectangle(cores), (TILE, width // cores))


def users(count: int, width: int) -> ttnn.MemoryConfig:
    """A tile of heads for each user, on a core of its own."""
    cores = ttnn.num_cores_to_corerangeset(count, ttnn.CoreCoord(GRID, GRID), True)
    layout = ttnn.TensorMemoryLayout.HEIGHT_SHARDED
    return sharded(layout, ttnn.BufferType.L1, cores, (TILE, width))


def banks(rows: int, width: int) -> ttnn.MemoryConfig:
    """A weight cut by columns over the DRAM banks."""
    each = -(-width // (NUM_BANKS * TILE)) * TILE
    layout = ttnn.TensorMemoryLayout.WIDTH_SHARDED
    return sharded(layout, ttnn.BufferType.DRAM, ranges(NUM_BANKS, 1), (rows, each))


def divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, limit + 1) if number % n == 0)


def norm_blocks(width: int, cores: int):
    tiles = width // cores // TILE
    end = rectangle(cores).bounding_box().end
    return ttnn.LayerNormShardedMultiCoreProgramConfig(
        compute_with_storage_grid_size=[end.x + 1, end.y + 1],
        subblock_w=divisor(tiles, 4),
        block_h=1,
        block_w=tiles,
        inplace=False,
    )


def step_blocks(k_block: int, out_tiles: int):
    """One tile of rows; each core makes so many tiles of columns, weights come from the banks."""
    return ttnn.MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig(
        in0_block_w=k_block, per_core_M=1, per_core_N=out_tiles, fused_activation=None
    )


def prompt_blocks(k_block: int, rows: int, width: int, out_rows: int):
    """A core makes rows x width tiles, so many rows of them at a time."""
    sub_columns = divisor(width, 4)
    return ttnn.MatmulMultiCoreReuseMultiCastProgramConfig(
        compute_with_storage_grid_size=(GRID, GRID),
        in0_block_w=k_block,
        out_subblock_h=divisor(out_rows, 4 // sub_columns),
        out_subblock_w=sub_columns,
        out_block_h=out_rows,
        out_block_w=width,
        per_core_M=rows,
        per_core_N=width,
        transpose_mcast=False,
        fused_activation=None,
        fuse_batch=True,
    )


def attention_blocks(q_chunk: int, k_chunk: int):
    return ttnn.SDPAProgramConfig(
        compute_with_storage_grid_size=(GRID, GRID),
        exp_approx_mode=False,
        q_chunk_size=q_chunk,
        k_chunk_size=k_chunk,
    )


def fidelity(math, *, approx: bool, fp32_dest: bool, l1_acc: bool):
    return ttnn.WormholeComputeKernelConfig(
        math_fidelity=math,
        math_approx_mode=approx,
        fp32_dest_acc_en=fp32_dest,
        packer_l1_acc=l1_acc,
    )


def cast(x: ttnn.Tensor, dtype) -> ttnn.Tensor:
    return x if x.dtype == dtype else ttnn.typecast(x, dtype)


def single(number: float) -> float:
    """Rounded to 32 bits: ttnn takes no other float here."""
    return float(torch.tensor(number, dtype=torch.float32))


def product_in_pieces(x, pieces, k_block, cores, *, dtype, compute_kernel_config):
    """Columns of the output by parts, each of which fits L1."""
    parts = []
    for weight in pieces:
        tiles = weight.padded_shape[-1] // TILE
        part = ttnn.linear(
            x,
            weight,
            program_config=step_blocks(k_block, -(-tiles // cores)),
            compute_kernel_config=compute_kernel_config,
            memory_config=ttnn.L1_WIDTH_SHARDED_MEMORY_CONFIG,
            dtype=dtype,
        )
        parts.append(ttnn.to_memory_config(part, DRAM))
    return parts[0] if len(parts) == 1 else ttnn.concat(parts, dim=-1, memory_config=DRAM)
'''

WEIGHT_CLASS = '''\
@dataclass(frozen=True)
class Weight:
    """What one chip holds; the fields ``_over``: (mesh axis, how it is sharded)."""

    kind: str  # matrix, table, norm, bias, experts, sinks or taps
    rows: int
    columns: int
    dtype: object
    rows_over: tuple | None = None
    columns_over: tuple | None = None
    pieces: int = 0  # a list of so many products' columns; 0: one, no list
    experts: int = 0  # on a chip
    experts_over: tuple | None = None

    @property
    def exact_shapes(self) -> list[tuple[int, ...]]:
        """Shapes without padding: convolutions, experts and sinks."""
        shapes = {
            "taps": [(1, 1, 1, self.columns)] * self.rows,
            "experts": [(1, self.experts, self.rows, self.columns)],
            "sinks": [(1, self.columns, 1, 1)],
        }
        return shapes.get(self.kind, [])

    @property
    def is_list(self) -> bool:
        return self.pieces > 0 or len(self.exact_shapes) > 1

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """What is handed to ttnn, by piece."""
        if self.exact_shapes:
            return self.exact_shapes
        each = -(-self.columns // (max(self.pieces, 1) * TILE)) * TILE
        found = []
        for start in range(0, self.columns, each):
            width = min(each, -(-(self.columns - start) // TILE) * TILE)
            found.append((self.rows, width) if self.kind == "table" else (1, 1, self.rows, width))
        return found

    def cut(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What a chip holds, by piece; columns that fill a tile are zeros."""
        if self.exact_shapes:
            pieces = part.chunk(len(self.shapes), 0)
            return [p.reshape(s) for p, s in zip(pieces, self.shapes)]
        widths = [shape[-1] for shape in self.shapes]
        full = torch.nn.functional.pad(part, (0, sum(widths) - part.shape[-1]))
        return [p.reshape(s) for p, s in zip(full.split(widths, -1), self.shapes)]

    @property
    def layout(self):
        return ttnn.ROW_MAJOR_LAYOUT if self.kind == "table" else ttnn.TILE_LAYOUT

    def memory(self, shape: tuple[int, ...]) -> ttnn.MemoryConfig:
        return banks(*shape[-2:]) if self.kind == "matrix" else DRAM
'''

WEIGHTS = '''\
def part_of(whole: torch.Tensor, axis: int, over: tuple | None, chip: tuple[int, int]):
    """What a chip holds of a tensor along an axis: runs of the whole, zeros where one is None."""
    if over is None:
        return whole
    mesh_axis, shares = over
    if isinstance(shares, int):  # so many equal parts
        return whole.chunk(shares, axis)[chip[mesh_axis]]
    parts = []
    for start, count in shares[chip[mesh_axis]]:
        shape = [*whole.shape]
        shape[axis] = count
        zeros = torch.zeros(shape, dtype=whole.dtype)
        parts.append(zeros if start is None else whole.narrow(axis, start, count))
    return torch.cat(parts, axis)


def host_pieces(whole: torch.Tensor, spec: Weight) -> list[ttnn.Tensor]:
    """A weight on the host, quantised as the board's formats are, a part for every chip."""
    matrix = whole.reshape(1, -1) if whole.ndim == 1 else whole
    made: dict[tuple, list[ttnn.Tensor]] = {}
    chips = []
    for chip in [(row, column) for row in range(MESH[0]) for column in range(MESH[1])]:
        cuts = ((-3, spec.experts_over), (-2, spec.rows_over), (-1, spec.columns_over))
        key = tuple(over and chip[over[0]] for _, over in cuts)
        if key not in made:
            part = matrix
            for axis, over in cuts:
                part = part_of(part, axis, over, chip)
            made[key] = [
                ttnn.from_torch(piece, dtype=spec.dtype, layout=spec.layout)
                for piece in spec.cut(part)
            ]
        chips.append(made[key])
    if len(chips) == 1:
        return chips[0]
    mesh = ttnn.MeshShape(*MESH)
    return [ttnn.from_host_shards(list(parts), mesh) for parts in zip(*chips)]


def placed(whole: torch.Tensor, spec: Weight, mesh_device):
    """A weight on the chips: a tensor, or a list of pieces of its columns."""
    found = [
        ttnn.to_device(host, mesh_device, memory_config=spec.memory(shape))
        for host, shape in zip(host_pieces(whole, spec), spec.shapes)
    ]
    return found if spec.is_list else found[0]


def blank(spec: Weight, mesh_device):
    """As :func:`placed`, without values."""
    found = [
        ttnn.empty(shape, spec.dtype, spec.layout, mesh_device, spec.memory(shape))
        for shape in spec.shapes
    ]
    return found if spec.is_list else found[0]


def convert_weights(folder: Path, mesh_device) -> tuple[dict, list[dict]]:
    """From the safetensors files to tensors on the chips, one at a time."""
    from safetensors import safe_open

    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise SystemExit(f"{folder}: no tensor {name!r} in its safetensors files")
        with safe_open(files[name], "pt") as opened:
            return opened.get_tensor(name)

    outside = {n: placed(read(n), spec, mesh_device) for n, spec in OUTSIDE.items()}
    layers = [
        {n: placed(read(LAYER.format(i) + n), spec, mesh_device) for n, spec in found.items()}
        for i, found in enumerate(map(layer_weights, range(NUM_LAYERS)))
    ]
    return {**outside, "frequencies": [read(name) for name, _, _ in ROTATIONS]}, layers


def blank_weights(mesh_device) -> tuple[dict, list[dict]]:
    """Tensors of the same shapes and places without values, to check the program with."""
    outside = {n: blank(spec, mesh_device) for n, spec in OUTSIDE.items()}
    layers = [
        {n: blank(spec, mesh_device) for n, spec in layer_weights(i).items()}
        for i in range(NUM_LAYERS)
    ]
    return {**outside, "frequencies": [torch.ones(count) for _, count, _ in ROTATIONS]}, layers
'''
