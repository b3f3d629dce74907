"""How ttnn's product kernels cut their work, and the bytes of a core's L1 that takes.

The sums of circular buffers are those ttnn 0.81's allocator reports. Knows no text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.program.instructions import Matmul, tile_bytes
from tilewright.compiler.targets.tenstorrent.program.placement import GRID

L1_BYTES = 1_499_136
"""A core's whole L1; ttnn refuses what goes beyond."""

RESERVED_BYTES = 105_824
"""Of it, what the firmware and the kernels' own code take."""


# Values of a step that still lie in L1, and the gaps between them: buffers must end below the
# lowest. 288,256 bytes were seen with a head of 76,032 columns.
_SCATTERED = 300_000


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """A product of one tile of rows, its weight read from the DRAM banks.

    ``cores`` share K and N. ``num_pieces``: products that the columns are cut into.
    """

    cores: int
    k_block: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A product of many rows on the whole grid; a core does ``rows`` x ``columns`` tiles, and
    ``out_rows`` of those rows at a time.
    """

    k_block: int
    rows: int
    columns: int
    out_rows: int


def step_blocks(matmul: Matmul) -> StepBlocks:
    """The cut of a product of one tile of rows."""
    k_tiles, cores = matmul.x.tiles[1], matmul.cores
    assert k_tiles % (cores * matmul.k_block) == 0, "a block divides a core's share of K"
    return StepBlocks(cores, matmul.k_block, _num_pieces(matmul))


def prompt_blocks(matmul: Matmul) -> PromptBlocks:
    """The cut of a product of more rows: as many at a time as fit."""
    m_tiles, n_tiles = matmul.out.tiles
    rows, columns = -(-m_tiles // GRID), -(-n_tiles // GRID)
    fitting = [
        count
        for count in range(1, rows + 1)
        if rows % count == 0 and _prompt_bytes(matmul, count, columns) <= L1_BYTES
    ]
    return PromptBlocks(matmul.k_block, rows, columns, max(fitting, default=1))


def product_bytes(matmul: Matmul) -> int:
    """Bytes of a core's L1 that a product takes, without what is reserved."""
    if matmul.out.tiles[0] == 1:
        pieces = _num_pieces(matmul)
        return _step_bytes(matmul, -(-_n_tiles(matmul) // pieces)) - RESERVED_BYTES
    blocks = prompt_blocks(matmul)
    return _prompt_bytes(matmul, blocks.out_rows, blocks.columns) - RESERVED_BYTES


def _n_tiles(matmul: Matmul) -> int:
    return -(-matmul.weight.columns // TILE)


def _num_pieces(matmul: Matmul) -> int:
    """The fewest equal pieces of the columns that leave room."""
    n_tiles = _n_tiles(matmul)

    def fits(pieces: int) -> bool:
        return _step_bytes(matmul, -(-n_tiles // pieces)) <= L1_BYTES - _SCATTERED

    return 1 + bisect_left(range(1, n_tiles), True, key=fits)


def _step_bytes(matmul: Matmul, n_tiles: int) -> int:
    """Buffers of the cores that read a bank's share of N, and the shards of both operands."""
    x_tile, out_tile = tile_bytes(matmul.x.format), tile_bytes(matmul.out.format)
    a_bank = -(-n_tiles // matmul.weight.memory.cores)
    weights = 3 * matmul.k_block * a_bank * tile_bytes(matmul.weight.format)
    sums = -(-a_bank // 4) * 4 * (out_tile + tile_bytes("fp32"))
    shards = 2 * -(-matmul.x.tiles[1] // matmul.cores) * x_tile
    shards += 2 * -(-n_tiles // matmul.cores) * out_tile
    return RESERVED_BYTES + 2 * matmul.k_block * x_tile + weights + sums + shards


def _prompt_bytes(matmul: Matmul, out_rows: int, columns: int) -> int:
    """Two blocks of each operand, the sums and the result of ``out_rows`` rows of tiles."""
    rows = -(-matmul.out.tiles[0] // GRID)
    blocks = 2 * matmul.k_block * rows * tile_bytes(matmul.x.format)
    blocks += 2 * matmul.k_block * columns * tile_bytes(matmul.weight.format)
    sums = out_rows * columns * (tile_bytes(matmul.out.format) + tile_bytes("fp32"))
    return RESERVED_BYTES + blocks + sums
