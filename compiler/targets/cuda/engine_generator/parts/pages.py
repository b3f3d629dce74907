"""GPU memory at reserved addresses. It grows in place, so graphs stay valid."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import heapq
import math
import sys
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings

PAGE = 64
"""Positions per page."""

POSITIONS, MORE_POSITIONS = 4096, 1024
"""Initial positions with memory, and the increment."""

SPARE_PAGES = 4
"""Free pages per request after a prefill, so that decode steps map no memory."""

MOST_ROWS = 1 << 16


driver = functools.cache(lambda: ctypes.CDLL("libcuda.so.1"))


def call(name: str, *arguments: Any) -> None:
    """Call a driver function.

    Raises:
        OutOfMemoryError, RuntimeError: the driver returns an error.
    """
    result = getattr(driver(), name)(*arguments)
    if result:
        kind = torch.OutOfMemoryError if result == 2 else RuntimeError
        raise kind(f"{name}: CUDA error {result}")


class Addresses:
    """A range of GPU addresses. `grow` maps memory from the beginning.

    Tensors use the range through ``__cuda_array_interface__`` and keep the memory alive.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # creates the context
        self._device, self._parts = device, list[int]()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._kind = (ctypes.c_uint64 * 4)(1, 1 | index << 32)  # CUmemAllocationProp: of the device
        self._access = (ctypes.c_int * 3)(1, index, 3)  # CUmemAccessDesc: read and write
        granule, self._first = ctypes.c_size_t(), ctypes.c_uint64()
        call("cuMemGetAllocationGranularity", ctypes.byref(granule), self._kind, 0)
        self._granule = granule.value
        self._limit = self._rounded(limit)
        sizes = ctypes.c_size_t(self._limit), ctypes.c_size_t(0)
        zeros = ctypes.c_uint64(0), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(self._first), *sizes, *zeros)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = self._first.value, False
        return {"shape": (self._limit,), "typestr": "|u1", "data": place, "version": 3}

    def grow(self, size: int) -> None:
        """Map memory for the first ``size`` bytes."""
        if (missing := self._rounded(size) - sum(self._parts)) > 0:
            try:
                self._map(missing)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                self._map(missing)

    def shrink(self, num_parts: int = 1) -> None:
        """Unmap all memory except from the first calls to `grow`."""
        if len(self._parts) > num_parts:
            torch.cuda.synchronize(self._device)  # kernels may read the memory
        while len(self._parts) > num_parts:
            size = self._parts.pop()
            call("cuMemUnmap", *self._part(sum(self._parts), size))

    def _map(self, size: int) -> None:
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        where, length = self._part(sum(self._parts), size)
        call("cuMemCreate", ctypes.byref(handle), length, self._kind, zero)
        try:
            call("cuMemMap", where, length, ctypes.c_size_t(0), handle, zero)
        finally:
            call("cuMemRelease", handle)  # mapped memory stays until unmapping
        self._parts.append(size)
        call("cuMemSetAccess", where, length, self._access, ctypes.c_size_t(1))

    def _part(self, begin: int, size: int) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
        return ctypes.c_uint64(self._first.value + begin), ctypes.c_size_t(size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._granule) * self._granule

    def __del__(self) -> None:
        if getattr(self, "_first", None) and not sys.is_finalizing():
            self.shrink(0)
            call("cuMemAddressFree", *self._part(0, self._limit))


class Rows:
    """Rows of tensors by number. The lowest free row is first.

    The first ``least`` rows always have memory. Further rows get memory in units of ``step``, until
    the last of them is free again.
    """

    def __init__(self, least: int, step: int, row_bytes: int, device: torch.device) -> None:
        self._least, self._step, self._device = least, step, device
        room = 1 << 28
        if device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory
        self._limit = max(least, min(MOST_ROWS, room // row_bytes))
        self._free, self.size, self.num_taken = [*range(least)], least, 0
        self._tensors: list[tuple[Tensor, Addresses | None]] = []

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor ``[limit, *shape]``. Rows without memory must not be accessed."""
        row_bytes, addresses = math.prod(shape) * dtype.itemsize, None
        if self._device.type == "cuda":
            addresses = Addresses(self._limit * row_bytes, self._device)
            addresses.grow(self.size * row_bytes)
            flat = torch.as_tensor(addresses, device=self._device)[: self._limit * row_bytes]
        else:
            flat = torch.empty(self._limit * row_bytes, dtype=torch.uint8)
        found = flat.view(dtype).view(self._limit, *shape)
        found[: self.size].zero_()
        self._tensors.append((found, addresses))
        return found

    def take(self, count: int, spare: int = 0) -> list[int]:
        """Take ``count`` free rows. ``spare``: rows to leave free, if memory allows.

        Raises:
            OutOfMemoryError: too few rows are free.
        """
        if (missing := count + spare - len(self._free)) > 0:
            with contextlib.suppress(torch.OutOfMemoryError):
                self._grow(self.size + -(-missing // self._step) * self._step)
        if count > len(self._free):
            raise torch.OutOfMemoryError(f"{self.num_taken} rows are in use, no memory for more")
        self.num_taken += count
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, rows: list[int]) -> None:
        """Free rows without readers."""
        for row in rows:
            heapq.heappush(self._free, row)
        self.num_taken -= len(rows)
        if not self.num_taken and self.size > self._least:
            for _, addresses in self._tensors:
                if addresses is not None:
                    addresses.shrink()
            self._free, self.size = [*range(self._least)], self._least

    def _grow(self, size: int) -> None:
        size = min(size, self._limit)
        for tensor, addresses in self._tensors:
            if addresses is not None:
                addresses.grow(size * tensor[0].nbytes)
            tensor[self.size : size].zero_()
        self._free += range(self.size, size)  # stays a heap
        self.size = size


class Pages(Rows):
    """Pages of keys and values, each ``[layers, 2, kv heads, PAGE, head_dim]``."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        s = settings
        self.layer_size = 2 * s.num_kv_heads * PAGE * s.head_dim
        self.page_size = s.num_cached * self.layer_size
        bytes_of_page = self.page_size * s.dtype.itemsize
        super().__init__(POSITIONS // PAGE, MORE_POSITIONS // PAGE, bytes_of_page, device)
        self.base = self.tensor((self.page_size,), s.dtype).view(-1)
