"""Copies and events by the CUDA driver, for the time between two steps. Excludes kernels.

After a wait for a step, the caches of the host hold other data: the first call of torch takes ten
times as long as a call of the driver.
"""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.cache
def _library() -> ctypes.CDLL:
    library, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64
    library.cuMemcpyDtoHAsync_v2.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
    library.cuMemcpyHtoDAsync_v2.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
    library.cuEventRecord.argtypes = (pointer, pointer)
    return library


def current_stream(device: torch.device) -> int:
    """Return the driver's handle of the current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def copy_to_host(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy from the device to pinned memory, without a wait. Both are addresses."""
    _check(_library().cuMemcpyDtoHAsync_v2(target, source, num_bytes, stream))


def copy_to_device(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy from pinned memory to the device, without a wait. Both are addresses."""
    _check(_library().cuMemcpyHtoDAsync_v2(target, source, num_bytes, stream))


def record(event: int, stream: int) -> None:
    """Record an event by its handle."""
    _check(_library().cuEventRecord(event, stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA: error {error}")
