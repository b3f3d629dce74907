"""Measured peak rates of a device: streaming reads and large dense matmuls."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from tilewright.compiler.devices import describe_cpu
from tilewright.evaluate.results.record import Ceilings

BUFFER_BYTES = 1 << 30
_READ_PASSES = 3
READ_BYTES = 4 << 30
"""Size of a GPU's read buffer in bytes, much larger than its caches."""
PRODUCT_SIZE = 8192
_CPU_PRODUCT_SIZE = 1024
_WARM_UP = 3
_REPEATS = 15
_CPU_REPEATS = 3


def measure_ceilings(target: str) -> Ceilings:
    """Measure the peak rates of a target's device.

    Raises:
        CompileError: ``cuda`` has no GPU.
    """
    if target == "cuda":
        from tilewright.compiler.targets.cuda.memory_budget import open_device

        device = open_device()
        if device.type == "cuda":
            return gpu_ceilings(device)
    return cpu_ceilings(describe_cpu().num_cores)


def cpu_ceilings(num_threads: int, *, num_bytes: int = BUFFER_BYTES) -> Ceilings:
    """Measure reads with NumPy over a buffer larger than the caches, and float32 matmuls with
    torch.
    """
    reads = [read_bandwidth(num_threads, num_bytes=num_bytes) for _ in range(_CPU_REPEATS)]
    size = _CPU_PRODUCT_SIZE
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    torch.mm(a, b, out=out)
    products = []
    for _ in range(_CPU_REPEATS):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        products.append(2.0 * size**3 / (time.perf_counter() - started))
    name = f"{describe_cpu().model_name}, {num_threads} threads"
    return Ceilings(name, tuple(reads), tuple(products), "fp32")


def gpu_ceilings(device: torch.device) -> Ceilings:
    """Measure reads by a sum over 4 GiB as int64, and matmuls by 8192^3 in random bfloat16 with
    cuBLAS.

    Zeros would run faster with less power.
    """
    reads = tuple(READ_BYTES / seconds for seconds in _read_seconds(device))
    # cuBLAS's workspace, which persists, would otherwise retain the whole buffer
    torch.cuda.empty_cache()
    products = tuple(2.0 * PRODUCT_SIZE**3 / seconds for seconds in _product_seconds(device))
    torch.cuda.empty_cache()
    return Ceilings(torch.cuda.get_device_name(device), reads, products, "bf16")


def _read_seconds(device: torch.device) -> list[float]:
    values = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    return _gpu_seconds(lambda: torch.sum(values))


def _product_seconds(device: torch.device) -> list[float]:
    shape = PRODUCT_SIZE, PRODUCT_SIZE
    a = torch.randn(shape, dtype=torch.bfloat16, device=device)
    b = torch.randn(shape, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return _gpu_seconds(lambda: torch.mm(a, b, out=out))


def _gpu_seconds(run: Callable[[], object]) -> list[float]:
    """Return the seconds of several runs that are queued together, without launch time."""
    for _ in range(_WARM_UP):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * float(before.elapsed_time(after)) for before, after in pairwise(marks)]


def read_bandwidth(num_threads: int, *, num_bytes: int = BUFFER_BYTES) -> float:
    """Return the read rate of ``num_threads`` in bytes per second, the best of three passes.

    Each thread reads a single stream: it sums its part of the buffer as int64. Several streams on
    different pages can be faster, so decode can exceed this rate. NumPy sums without Python's lock
    and with vector instructions. The buffer is written first, to allocate its pages.
    """
    assert num_threads >= 1 and num_bytes >= 8 * num_threads
    parts = np.array_split(np.full(num_bytes // 8, 1, dtype=np.int64), num_threads)
    total = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_READ_PASSES):
            started = time.perf_counter()
            sums = list(pool.map(np.add.reduce, parts))
            best = max(best, total / (time.perf_counter() - started))
            assert sum(int(each) for each in sums) == total // 8
    return best
