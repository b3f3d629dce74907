"""Block sizes for ttnn's matmul kernels and their L1 usage in bytes.

Circular buffers have the sizes reported by the ttnn 0.81 allocator.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.program.instructions import Matmul, tile_bytes
from tilewright.compiler.targets.tenstorrent.program.placement import GRID

L1_BYTES = 1_499_136
"""A core's L1 size. ttnn refuses a larger allocation."""

RESERVED_BYTES = 105_824
"""L1 bytes for the firmware and the kernel code."""


# Live values in L1 during a step, and the gaps between them. Buffers must end below the lowest
# value. The largest observed size is 288,256 bytes, for an LM head with 76,032 columns.
_SCATTERED = 300_000


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Blocks for a matmul with one row of tiles, which reads its weight from the DRAM banks.

    Attributes:
        cores: Cores for K and N.
        k_block: K tiles in a block.
        num_pieces: Matmuls that share the columns.
    """

    cores: int
    k_block: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Blocks for a matmul with more rows on the whole grid.

    Attributes:
        k_block: K tiles in a block. rows, columns: Output tiles for a core.
        out_rows: Tile rows computed at a time.
    """

    k_block: int
    rows: int
    columns: int
    out_rows: int


def step_blocks(matmul: Matmul) -> StepBlocks:
    """Return the blocks for a matmul with one row of tiles."""
    k_tiles, cores = matmul.x.tiles[1], matmul.cores
    assert k_tiles % (cores * matmul.k_block) == 0, "a block divides a core's share of K"
    return StepBlocks(cores, matmul.k_block, _num_pieces(matmul))


def prompt_blocks(matmul: Matmul) -> PromptBlocks:
    """Return the block sizes for a prefill matmul. ``out_rows`` is the maximum that fits L1."""
    m_tiles, n_tiles = matmul.out.tiles
    rows, columns = -(-m_tiles // GRID), -(-n_tiles // GRID)
    fitting = [
        count
        for count in range(1, rows + 1)
        if rows % count == 0 and _prompt_bytes(matmul, count, columns) <= L1_BYTES
    ]
    return PromptBlocks(matmul.k_block, rows, columns, max(fitting, default=1))


def product_bytes(matmul: Matmul) -> int:
    """Return a matmul's L1 usage on a core in bytes, without the reserved bytes."""
    if matmul.out.tiles[0] == 1:
        pieces = _num_pieces(matmul)
        return _step_bytes(matmul, -(-_n_tiles(matmul) // pieces)) - RESERVED_BYTES
    blocks = prompt_blocks(matmul)
    return _prompt_bytes(matmul, blocks.out_rows, blocks.columns) - RESERVED_BYTES


def _n_tiles(matmul: Matmul) -> int:
    return -(-matmul.weight.columns // TILE)


def _num_pieces(matmul: Matmul) -> int:
    """Return the smallest number of equal column ranges that fit L1."""
    n_tiles = _n_tiles(matmul)

    def fits(pieces: int) -> bool:
        return _step_bytes(matmul, -(-n_tiles // pieces)) <= L1_BYTES - _SCATTERED

    return 1 + bisect_left(range(1, n_tiles), True, key=fits)


def _step_bytes(matmul: Matmul, n_tiles: int) -> int:
    """Return the total buffer size, with both operands' shards and the reserved bytes."""
    x_tile, out_tile = tile_bytes(matmul.x.format), tile_bytes(matmul.out.format)
    a_bank = -(-n_tiles // matmul.weight.memory.cores)
    weights = 3 * matmul.k_block * a_bank * tile_bytes(matmul.weight.format)
    sums = -(-a_bank // 4) * 4 * (out_tile + tile_bytes("fp32"))
    shards = 2 * -(-matmul.x.tiles[1] // matmul.cores) * x_tile
    shards += 2 * -(-n_tiles // matmul.cores) * out_tile
    return RESERVED_BYTES + 2 * matmul.k_block * x_tile + weights + sums + shards


def _prompt_bytes(matmul: Matmul, out_rows: int, columns: int) -> int:
    """Return the size of two blocks for both operands, and for the sums and results in
    ``out_rows``.
    """
    rows = -(-matmul.out.tiles[0] // GRID)
    blocks = 2 * matmul.k_block * rows * tile_bytes(matmul.x.format)
    blocks += 2 * matmul.k_block * columns * tile_bytes(matmul.weight.format)
    sums = out_rows * columns * (tile_bytes(matmul.out.format) + tile_bytes("fp32"))
    return RESERVED_BYTES + blocks + sums
