"""Board formats, memory layouts and kernel block sizes along K.

Block sizes follow the vendor's demos. They change the bits of a sum and its time because partial
sums are packed between blocks.
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
"""Positions in a cache page."""

PROMPT_CHUNK = 2048
"""Maximum number of prompt tokens in one step."""

WEIGHT_FORMATS = ("bf16", "bfp8", "bfp4")
CACHE_FORMATS = ("bf16", "bfp8", "bfp4")
ACTIVATION_FORMATS = ("bf16", "bfp8", "bfp4")

GRID = 8
"""Worker cores along each side of a chip. Kernels do not use Blackhole's larger grid."""

_MAX_CORES = GRID * GRID
_MAX_K_BLOCK = {"decode": 8, "prefill": 4}

_MAX_CHUNK = 256

# Maximum N tiles on one core before more cores are used.
_MAX_TILES_A_CORE = 64

# Maximum bytes for weight blocks in a core's L1: half its size.
_WEIGHT_ROOM = 700_000


def check_weight_format(fqn: str, format_: str | None) -> None:
    """Raise an error if ttnn matmuls do not support a weight format.

    Raises:
        CompileError: Names the module and the supported formats.
    """
    if format_ not in WEIGHT_FORMATS:
        raise CompileError(
            f"{fqn}: weights in {format_}; on Tenstorrent boards {allowed(WEIGHT_FORMATS)}"
        )


def check_cache_format(name: str, format_: str) -> None:
    """Raise an error if boards do not support a cache format; see :func:`check_weight_format`."""
    if format_ not in CACHE_FORMATS:
        raise CompileError(f"{name}: {format_}; on Tenstorrent boards {allowed(CACHE_FORMATS)}")


def check_activation_format(fqn: str, format_: str) -> str:
    """Return a result's format, or raise an error if boards do not support it."""
    if format_ not in ACTIVATION_FORMATS:
        raise CompileError(
            f"{fqn}: activations in {format_}; on Tenstorrent boards {allowed(ACTIVATION_FORMATS)}"
        )
    return format_


def activation_memory(columns: int, phase: str) -> Memory:
    """Return the memory for activations: width-sharded L1 in decode, interleaved DRAM in
    prefill.
    """
    if phase != DECODE:
        return Memory()
    return Memory(L1, WIDTH_SHARDED, shard_cores(-(-columns // TILE)))


def heads_memory(batch: int, phase: str) -> Memory:
    """Return the memory for attention heads. In decode, a core has all heads for one user."""
    return Memory(L1, HEIGHT_SHARDED, batch) if phase == DECODE else Memory()


def weight_memory(num_banks: int) -> Memory:
    """Return the memory for a matmul weight: columns sharded over the DRAM banks."""
    return Memory(DRAM, WIDTH_SHARDED, num_banks)


def shard_cores(num_tiles: int) -> int:
    """Return the largest number of cores that forms a rectangle and divides ``num_tiles``."""
    fitting = [count for count in range(1, _MAX_CORES + 1) if num_tiles % count == 0]
    return max(count for count in fitting if _is_rectangle(count))


def matmul_blocks(x: TtValue, weight: TtWeight, phase: str) -> tuple[int, int]:
    """Return a matmul's core count, and its K tiles in a block.

    For one row of tiles, the core count divides K and N. If N is too wide (the LM head), the count
    divides K only. A block divides a core's K tiles. For more rows, the matmul uses the whole grid.
    L1 must have capacity for three weight blocks with one row and for two with more.
    """
    k_tiles, n_tiles = x.tiles[1], -(-weight.columns // TILE)
    if x.tiles[0] == 1:
        cores = shard_cores(math.gcd(k_tiles, n_tiles))
        if n_tiles > cores * _MAX_TILES_A_CORE:
            cores = shard_cores(k_tiles)
        share, num_stored = k_tiles // cores, 3 * -(-n_tiles // weight.memory.cores)
    else:
        cores, share, num_stored = _MAX_CORES, k_tiles, 2 * -(-n_tiles // GRID)
    room = _WEIGHT_ROOM // (num_stored * tile_bytes(weight.format))
    return cores, _largest_divisor(share, max(1, min(_MAX_K_BLOCK[phase], room)))


def key_chunk(context: int) -> int:
    """Return the cache positions in an attention chunk.

    The result is the largest power of two within the pages, at most 256.
    """
    room = -(-context // PAGE) * PAGE
    return min(_MAX_CHUNK, 1 << (room.bit_length() - 1))


def _largest_divisor(number: int, limit: int) -> int:
    return max(each for each in range(1, min(number, limit) + 1) if number % each == 0)


def _is_rectangle(count: int) -> bool:
    return any(count % rows == 0 and count // rows <= GRID for rows in range(1, GRID + 1))
