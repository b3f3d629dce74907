"""Copies, events and graphs by the CUDA driver. Excludes kernels.

Steps use them because host caches are cold after a wait. The first call of torch is then ten times
slower than a call of the driver.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_INVALID_CONTEXT = 201


@functools.cache
def _library() -> ctypes.CDLL:
    library, word = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64
    library.cuMemcpyDtoHAsync_v2.argtypes = (word, word, word, word)
    library.cuMemcpyHtoDAsync_v2.argtypes = (word, word, word, word)
    library.cuEventRecord.argtypes = library.cuGraphLaunch.argtypes = (word, word)
    return library


def copy_to_host(target: int, source: int, num_bytes: int, *, event: int, device: int) -> None:
    """Copy from a device to pinned memory without a wait, then record an event.

    Memory is given by its addresses, the event by the driver's handle.
    """
    _call("cuMemcpyDtoHAsync_v2", device, target, source, num_bytes)
    _call("cuEventRecord", device, event)


def copy_to_device(target: int, source: int, num_bytes: int, *, device: int) -> None:
    """Copy from pinned memory to a device without a wait. Memory is given by its addresses."""
    _call("cuMemcpyHtoDAsync_v2", device, target, source, num_bytes)


def launch_graph(graph: int, *, device: int) -> None:
    """Launch an executable graph by the driver's handle."""
    _call("cuGraphLaunch", device, graph)


def _call(name: str, device: int, *arguments: int) -> None:
    """Call a function of the driver whose last argument is the current stream."""
    function, stream = getattr(_library(), name), torch._C._cuda_getCurrentRawStream(device)
    error = function(*arguments, stream)
    if error == _INVALID_CONTEXT:  # this thread has not called torch
        torch.zeros(1, device=torch.device("cuda", device))
        error = function(*arguments, stream)
    if error:
        raise RuntimeError(f"CUDA: {name}: error {error}")
