"""Slot state for ONNX Runtime: contiguous key/value caches and constant-size state, bound by
pointer.

Address space is reserved, and memory is used only after writes. Pages of a freed slot return to the
system at once.
"""

from __future__ import annotations

import math
import mmap
import platform
import sys
from collections.abc import Sequence

import numpy as np

from tilewright.compiler.targets.cpu.onnxruntime.emitter import (
    STATE_SUFFIX,
    CacheSpec,
    SequenceState,
)
from tilewright.errors import CompileError

_ITEM = 4  # float32

# Python has the flag's name from version 3.13. The number is Linux's on these processors.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)

Binding = tuple[str, tuple[int, ...], int]
"""Name, shape and address of a tensor for a window of slots."""


class _LazyZeros:
    """Zero pages from the system. They use memory only after a write."""

    def __init__(self, num_bytes: int, what: str, remedy: str) -> None:
        """Reserve pages. ``what`` is their purpose and ``remedy`` the advice in errors."""
        # Private, because the system retains pages of shared mappings despite advice. Without a
        # reserve, because large parts of a cache are never written, and its size may exceed the
        # memory.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._mapping = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=kind)
        except OSError as error:
            raise CompileError(f"{what} ({error.strerror}); allowed: fewer {remedy}") from None
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def floats(self, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the float32 tensor at a byte offset."""
        part = self.bytes[start : start + math.prod(shape) * _ITEM]
        found: np.ndarray = part.view(np.float32).reshape(shape)
        return found

    def clear(self, start: int, size: int) -> None:
        """Set bytes to zero. Whole pages return to the system."""
        first = start + -start % mmap.PAGESIZE
        last = max(first, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE)
        if not (hasattr(self._mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED")):
            first = last = start + size
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.bytes[start : min(first, start + size)] = 0
        self.bytes[last : max(last, start + size)] = 0


class SlotCaches:
    """Keys and values ``[num_slots, G, L, D]`` float32 for every layer, in a single anonymous
    mapping.

    ``length`` is L, the longest sequence plus 1: idle rows in a window write after their last
    position.
    """

    def __init__(self, specs: Sequence[CacheSpec], num_slots: int, length: int) -> None:
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self.length = length
        self._slot_bytes = [s.num_kv_heads * length * s.head_dim * _ITEM for s in specs]
        assert not any(size % mmap.PAGESIZE for size in self._slot_bytes), "see padded_length"
        self._offsets = []
        total = 0
        for size in self._slot_bytes:
            self._offsets.append((total, total + size * num_slots))
            total += 2 * size * num_slots
        wanted = f"a cache of {total} bytes for {num_slots} sequences of {length} positions"
        self._pages = _LazyZeros(total, wanted, "sequences or positions")

    def bindings(self, first: int, last: int) -> list[Binding]:
        """Return name, shape and address of every cache tensor for slots ``first`` to ``last -
        1``.
        """
        bound: list[Binding] = []
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            shape = (last - first, spec.num_kv_heads, self.length, spec.head_dim)
            for part, offset in zip(("key", "value"), offsets, strict=True):
                address = self._pages.address + offset + first * size
                bound.append((f"{spec.name}.{part}", shape, address))
        return bound

    def release(self, slot: int) -> None:
        """Free a slot's pages. Afterwards it reads as zeros."""
        for size, offsets in zip(self._slot_bytes, self._offsets, strict=True):
            for offset in offsets:
                self._pages.clear(offset + slot * size, size)

    def copy(self, source: int, target: int, num_positions: int) -> None:
        """Copy a slot's first positions to another slot."""
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            shape = (spec.num_kv_heads, self.length, spec.head_dim)
            for offset in offsets:
                old, new = (
                    self._pages.floats(offset + slot * size, shape) for slot in (source, target)
                )
                new[:, :num_positions] = old[:, :num_positions]

    def num_bytes(self, num_positions: int) -> int:
        """Return the bytes for ``num_positions``, independent of sequences."""
        return sum(2 * s.num_kv_heads * s.head_dim * _ITEM * num_positions for s in self.specs)


class SlotStates:
    """Constant-size state, float32 ``[num_slots, *shape]`` per tensor, in a single anonymous
    mapping.

    Idle rows in a window are also written. :meth:`read` their state before a step and :meth:`write`
    it back.
    """

    def __init__(self, specs: Sequence[SequenceState], num_slots: int) -> None:
        self.specs = tuple(specs)
        self._sizes = [math.prod(spec.shape) * _ITEM for spec in specs]
        self._offsets = []
        total = 0
        for size in self._sizes:
            self._offsets.append(total)
            total += size * num_slots
            total += -total % mmap.PAGESIZE
        wanted = f"state of {total} bytes for {num_slots} sequences"
        self._pages = _LazyZeros(total, wanted, "sequences")

    @property
    def slot_bytes(self) -> int:
        """Return the state bytes per sequence."""
        return sum(self._sizes)

    def bindings(self, first: int, last: int) -> list[Binding]:
        """Return name, shape and address of every tensor for slots ``first`` to ``last - 1``."""
        return [
            (
                f"{spec.name}{STATE_SUFFIX}",
                (last - first, *spec.shape),
                self._pages.address + offset + first * size,
            )
            for spec, size, offset in zip(self.specs, self._sizes, self._offsets, strict=True)
        ]

    def release(self, slot: int) -> None:
        """Clear a slot. Whole pages return to the system."""
        for size, offset in zip(self._sizes, self._offsets, strict=True):
            self._pages.clear(offset + slot * size, size)

    def read(self, slot: int) -> list[np.ndarray]:
        """Return copies of a slot's tensors."""
        return [view.copy() for view in self._views(slot)]

    def write(self, slot: int, pieces: Sequence[np.ndarray]) -> None:
        """Write tensors from :meth:`read` to a slot."""
        for view, piece in zip(self._views(slot), pieces, strict=True):
            view[:] = piece

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's state to another slot."""
        self.write(target, self._views(source))

    def _views(self, slot: int) -> list[np.ndarray]:
        return [
            self._pages.floats(offset + slot * size, spec.shape)
            for spec, size, offset in zip(self.specs, self._sizes, self._offsets, strict=True)
        ]


def padded_length(specs: Sequence[CacheSpec], max_context: int) -> int:
    """Return the smallest L above ``max_context`` with whole pages per slot in every layer.

    A slot can then be freed separately, and windows of slots stay contiguous.
    """
    length = max_context + 1
    while any(s.num_kv_heads * length * s.head_dim * _ITEM % mmap.PAGESIZE for s in specs):
        length += 1
    return length
