"""Which formats a board has, where values lie, and in what blocks its kernels walk over K.

Block sizes follow what the vendor's demos choose; they decide the bits of a sum as well as its
time, since partial sums are packed between blocks.
"""

from __future__ import annotations

import math

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    DRAM,
    HEIGHT_SHARDED,
    L1,
    WIDTH_SHARDED,
    Memory,
    TtValue,
    TtWeight,
    tile_bytes,
)
from tilewright.errors import CompileError, allowed

PAGE = 32
"""Positions of a page of the cache."""

PROMPT_CHUNK = 2048
"""Tokens of a prompt that run at a time, at most."""

WEIGHT_FORMATS = ("bf16", "bfp8", "bfp4")
CACHE_FORMATS = ("bf16", "bfp8", "bfp4")
ACTIVATION_FORMATS = ("bf16", "bfp8", "bfp4")

GRID = 8
"""Worker cores along each side of a chip that kernels use, on Blackhole's larger grid too."""

_MAX_CORES = GRID * GRID
_MAX_K_BLOCK = {"decode": 8, "prefill": 4}

_MAX_CHUNK = 256

# Tiles of N on one core above which more cores are taken.
_MAX_TILES_A_CORE = 64

# Bytes of a core's L1 for blocks of weights: half of it.
_WEIGHT_ROOM = 700_000


def check_weight_format(fqn: str, format_: str | None) -> None:
    """Refuse a weight format that ttnn's products do not take.

    Raises:
        CompileError: naming the module and the formats there are.
    """
    if format_ not in WEIGHT_FORMATS:
        raise CompileError(
            f"{fqn}: weights in {format_}; on Tenstorrent boards {allowed(WEIGHT_FORMATS)}"
        )


def check_cache_format(name: str, format_: str) -> None:
    """Refuse a format of keys and values that a board has not; see :func:`check_weight_format`."""
    if format_ not in CACHE_FORMATS:
        raise CompileError(f"{name}: {format_}; on Tenstorrent boards {allowed(CACHE_FORMATS)}")


def check_activation_format(fqn: str, format_: str) -> str:
    """Refuse a format of operators' results that a board has not, as for weights."""
    if format_ not in ACTIVATION_FORMATS:
        raise CompileError(
            f"{fqn}: activations in {format_}; on Tenstorrent boards {allowed(ACTIVATION_FORMATS)}"
        )
    return format_


def activation_memory(columns: int, phase: str) -> Memory:
    """A step's rows of one user each lie in L1, cut by columns; a prompt's lie in DRAM."""
    if phase != DECODE:
        return Memory()
    return Memory(L1, WIDTH_SHARDED, shard_cores(-(-columns // TILE)))


def heads_memory(batch: int, phase: str) -> Memory:
    """Heads of a decode step: a core has those of one user."""
    return Memory(L1, HEIGHT_SHARDED, batch) if phase == DECODE else Memory()


def weight_memory(num_banks: int) -> Memory:
    """Columns over the DRAM banks, each of which the nearest cores read."""
    return Memory(DRAM, WIDTH_SHARDED, num_banks)


def shard_cores(num_tiles: int) -> int:
    """The most cores, in a rectangle of the grid, that divide so many tiles."""
    fitting = [count for count in range(1, _MAX_CORES + 1) if num_tiles % count == 0]
    return max(count for count in fitting if _is_rectangle(count))


def matmul_blocks(x: TtValue, weight: TtWeight, phase: str) -> tuple[int, int]:
    """Cores that share a product, and the tiles of K in a block.

    One row of tiles is cut over cores that divide both K and N, or K alone where N is wide (the
    head); a block divides a core's share of K. A prompt's product takes the whole grid. A block is
    no longer than leaves room on a core for the weights of three of one row (a bank's share of N)
    or of two of a prompt's.
    """
    k_tiles, n_tiles = x.tiles[1], -(-weight.columns // TILE)
    if x.tiles[0] == 1:
        cores = shard_cores(math.gcd(k_tiles, n_tiles))
        if n_tiles > cores * _MAX_TILES_A_CORE:
            cores = shard_cores(k_tiles)
        share, held = k_tiles // cores, 3 * -(-n_tiles // weight.memory.cores)
    else:
        cores, share, held = _MAX_CORES, k_tiles, 2 * -(-n_tiles // GRID)
    room = _WEIGHT_ROOM // (held * tile_bytes(weight.format))
    return cores, _largest_divisor(share, max(1, min(_MAX_K_BLOCK[phase], room)))


def key_chunk(context: int) -> int:
    """Positions of the cache that attention reads at a time: the largest power of two, at most
    256, that its pages have.
    """
    room = -(-context // PAGE) * PAGE
    return min(_MAX_CHUNK, 1 << (room.bit_length() - 1))


def _largest_divisor(number: int, limit: int) -> int:
    return max(each for each in range(1, min(number, limit) + 1) if number % each == 0)


def _is_rectangle(count: int) -> bool:
    return any(count % rows == 0 and count // rows <= GRID for rows in range(1, GRID + 1))
