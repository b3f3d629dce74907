# mypy: allow-untyped-defs, allow-incomplete-defs
"""Matrix unit sums over all of K on CPU threads, compiled by numba.

Excludes formats. The arithmetic for a tile is in ``matrix_unit_tile.py``.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.tenstorrent.emulate import matrix_unit_tile
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit_tile import (
    LANES,
    LEAST_EXPONENT,
    MISCOUNTED,
    NONE_MISCOUNTED,
    PHASE_EXPONENTS,
    TILE,
    add_tile,
    add_tile_in_integers,
    decode_rows,
    decode_weight,
    fits_float32,
    spill,
    without_nan,
)
from tilewright.compiler.targets.tenstorrent.emulate.strided_weight import StridedWeight
from tilewright.utils.files import cache_dir

ROWS = 64  # maximum number of rows for each decoded weight tile
_LEAST_SHARED = 1 << 15  # minimum work for a second thread, in products


def _cached() -> dict[str, Any]:
    """Return the numba options for all functions. The sources' hash is the cache key."""
    sources = Path(__file__).read_bytes() + Path(matrix_unit_tile.__file__).read_bytes()
    folder = cache_dir() / "numba" / hashlib.sha256(sources).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {"nogil": True}
    if not os.access(folder, os.W_OK):
        return {"nogil": True}
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    return {"nogil": True, "cache": True}


@functools.cache
def _kernel(num_phases: int, fp32: bool) -> Any:
    """Return the matmul for a fidelity and a Dst type. Further settings are arguments."""
    least = np.int32(LEAST_EXPONENT + PHASE_EXPONENTS[num_phases - 1])

    def run(operands, sizes, steps, block_tiles, reload, miscounted, first, step):
        act, xs, ranges, weight, offsets, out = operands
        num_rows, num_k, num_n = sizes
        num_tiles = (num_k + TILE - 1) // TILE
        num_columns = (num_n + LANES - 1) // LANES
        num_chunks = (num_rows + ROWS - 1) // ROWS
        last_block = (num_tiles - 1) // block_tiles * block_tiles
        ws = np.empty(3 * TILE * LANES, np.float32)
        raw = np.empty(TILE * LANES, np.int16)
        dst = np.empty(ROWS * LANES, np.int32)
        partial = np.empty(ROWS * LANES, np.int32)
        for task in range(first, len(offsets) * num_columns * num_chunks, step):
            batch, rest = divmod(task, num_columns * num_chunks)
            n0, row0 = rest // num_chunks * LANES, rest % num_chunks * ROWS
            rows, lanes = min(ROWS, num_rows - row0), min(LANES, num_n - n0)
            row0 += batch * num_rows
            dst[:] = 0
            if reload:
                for row in range(rows):
                    for n in range(lanes):
                        dst[row * LANES + n] = out[(row0 + row) * num_n + n0 + n]
            for tile in range(num_tiles):
                if tile > 0 and tile % block_tiles == 0:
                    spill(dst, partial, tile == block_tiles, tile == last_block, fp32)
                ks = min(TILE, num_k - tile * TILE)
                w = offsets[batch] + tile * TILE * steps[0] + n0 * steps[1]
                low, high = decode_weight(weight, w, steps, ks, lanes, raw, ws)
                for row in range(rows):
                    x = (row0 + row) * num_tiles + tile
                    if ranges[2 * x + 1] == 0 or high == 0:
                        continue  # zeros do not change Dst
                    if fits_float32(ranges, x, low, high, least):
                        columns = dst[row * LANES : (row + 1) * LANES]
                        parts = xs[x * 3 * TILE : (x + 1) * 3 * TILE]
                        add_tile(parts, ws, columns, num_phases, fp32, miscounted)
                    else:
                        a = (row0 + row) * num_k + tile * TILE
                        at = row * LANES
                        add_tile_in_integers(
                            *(act, a, weight, w, steps, ks, lanes, dst, at),
                            *(num_phases, fp32, miscounted),
                        )
            for row in range(rows):
                for n in range(lanes):
                    out[(row0 + row) * num_n + n0 + n] = without_nan(dst[row * LANES + n])

    return numba.njit(error_model="numpy", fastmath={"contract"}, **_cached())(run)


@functools.cache
def _decoder() -> Any:
    return numba.njit(error_model="numpy", **_cached())(decode_rows)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="matrix-unit")


def _spread(job: Callable[[int, int], object], num_threads: int) -> None:
    """Call ``job(i, num_threads)`` for every i. The last call runs in this thread."""
    others = range(num_threads - 1)
    futures = [_pool(len(others)).submit(job, i, num_threads) for i in others]
    job(num_threads - 1, num_threads)
    for future in futures:
        future.result()


def accumulate(
    out: Tensor,
    act: Tensor,
    weight: StridedWeight,
    *,
    num_phases: int,
    fp32_dst: bool,
    sign_error: bool,
    block_tiles: int,
    reload: bool,
) -> None:
    """Write Dst after all of K to ``out``.

    After every ``block_tiles`` tiles along K, Dst is added in L1 and cleared.

    Args:
        out: float32 ``[B, M, N]``, contiguous.
        act: bfloat16 ``[B, M, K]``, contiguous.
        sign_error: See ``MatmulSettings``.
        reload: Load the initial Dst from ``out``. False: Dst starts with zeros.
    """
    num_batches, num_rows, num_k = act.shape
    num_tiles = -(-num_k // TILE)
    bits = act.view(torch.int16).numpy().reshape(-1)
    xs = np.zeros(num_batches * num_rows * num_tiles * 3 * TILE, np.float32)
    ranges = np.empty(num_batches * num_rows * num_tiles * 2, np.int32)
    all_rows = num_batches * num_rows
    threads = torch.get_num_threads()

    def decode(index: int, count: int) -> None:
        rows = all_rows * index // count, all_rows * (index + 1) // count
        _decoder()(bits, num_k, xs, ranges, *rows)

    _spread(decode, threads if bits.size > _LEAST_SHARED else 1)
    operands = (
        bits,
        xs,
        ranges,
        weight.bits.numpy(),
        weight.offsets.numpy(),
        out.view(torch.int32).numpy().reshape(-1),
    )
    sizes = (num_rows, num_k, out.shape[-1])
    kernel = _kernel(num_phases, fp32_dst)
    miscounted = MISCOUNTED if sign_error else NONE_MISCOUNTED

    def multiply(index: int, count: int) -> None:
        steps = (weight.step_k, weight.step_n)
        kernel(operands, sizes, steps, block_tiles, reload, miscounted, index, count)

    _spread(multiply, threads if bits.size * out.shape[-1] > _LEAST_SHARED else 1)
