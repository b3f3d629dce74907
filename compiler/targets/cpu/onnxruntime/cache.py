"""What sequences keep, in contiguous slots bound to ONNX Runtime by pointer: key/value caches, and
state that does not grow.

Memory is reserved as address space and touched only where something is written; a freed slot's
pages go back to the system at once.
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

# Python names the flag from 3.13 on; the number is Linux' on these processors
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)

Binding = tuple[str, tuple[int, ...], int]
"""Name, shape and address of one tensor of a window of slots."""


class _Pages:
    """Zeros of the system's, which get memory of their own where they are written."""

    def __init__(self, num_bytes: int, what: str, remedy: str) -> None:
        """``what`` they are for, and what to ask for less of, in the words of an error."""
        # private: the system keeps the pages of a shared mapping whatever it is advised; without
        # a reserve: most of a cache is never written, and more than the memory may be asked for
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._mapping = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=kind)
        except OSError as error:
            raise CompileError(f"{what} ({error.strerror}); allowed: fewer {remedy}") from None
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def floats(self, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """The float32 tensor that begins at a byte."""
        part = self.bytes[start : start + math.prod(shape) * _ITEM]
        found: np.ndarray = part.view(np.float32).reshape(shape)
        return found

    def clear(self, start: int, size: int) -> None:
        """Zeros again: whole pages are given back."""
        first = start + -start % mmap.PAGESIZE
        last = max(first, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE)
        if not (hasattr(self._mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED")):
            first = last = start + size
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.bytes[start : min(first, start + size)] = 0
        self.bytes[last : max(last, start + size)] = 0


class SlotCaches:
    """Keys and values ``[num_slots, G, L, D]`` float32 of every layer, in one anonymous mapping.

    ``length`` is L: one position more than the longest sequence, since a row of a window that is
    not stepped still has a write, just behind its last position.
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
        self._pages = _Pages(total, wanted, "sequences or positions")

    def bindings(self, first: int, last: int) -> list[Binding]:
        """Name, shape and address of every cache tensor for slots ``first`` to ``last - 1``."""
        bound: list[Binding] = []
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            shape = (last - first, spec.num_kv_heads, self.length, spec.head_dim)
            for part, offset in zip(("key", "value"), offsets, strict=True):
                address = self._pages.address + offset + first * size
                bound.append((f"{spec.name}.{part}", shape, address))
        return bound

    def release(self, slot: int) -> None:
        """Give the pages of a slot back; it reads as zeros afterwards."""
        for size, offsets in zip(self._slot_bytes, self._offsets, strict=True):
            for offset in offsets:
                self._pages.clear(offset + slot * size, size)

    def copy(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another."""
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            shape = (spec.num_kv_heads, self.length, spec.head_dim)
            for offset in offsets:
                old, new = (
                    self._pages.floats(offset + slot * size, shape) for slot in (source, target)
                )
                new[:, :num_positions] = old[:, :num_positions]

    def num_bytes(self, num_positions: int) -> int:
        """Bytes that hold this many positions, of whatever sequences."""
        return sum(2 * s.num_kv_heads * s.head_dim * _ITEM * num_positions for s in self.specs)


class SlotStates:
    """State that does not grow, ``[num_slots, *shape]`` float32 a piece, in one anonymous mapping.

    A row of a window that is not stepped is written as the others are: :meth:`read` it before and
    :meth:`write` it back.
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
        self._pages = _Pages(total, wanted, "sequences")

    @property
    def slot_bytes(self) -> int:
        """The bytes of state that one sequence takes."""
        return sum(self._sizes)

    def bindings(self, first: int, last: int) -> list[Binding]:
        """Name, shape and address of every piece for slots ``first`` to ``last - 1``."""
        return [
            (
                f"{spec.name}{STATE_SUFFIX}",
                (last - first, *spec.shape),
                self._pages.address + offset + first * size,
            )
            for spec, size, offset in zip(self.specs, self._sizes, self._offsets, strict=True)
        ]

    def release(self, slot: int) -> None:
        """A slot reads as zeros afterwards; whole pages of it go back."""
        for size, offset in zip(self._sizes, self._offsets, strict=True):
            self._pages.clear(offset + slot * size, size)

    def read(self, slot: int) -> list[np.ndarray]:
        """Copy all pieces of a slot."""
        return [view.copy() for view in self._views(slot)]

    def write(self, slot: int, pieces: Sequence[np.ndarray]) -> None:
        """Put into a slot what :meth:`read` gave."""
        for view, piece in zip(self._views(slot), pieces, strict=True):
            view[:] = piece

    def copy(self, source: int, target: int) -> None:
        """Copy all state of one slot to another."""
        self.write(target, self._views(source))

    def _views(self, slot: int) -> list[np.ndarray]:
        return [
            self._pages.floats(offset + slot * size, spec.shape)
            for spec, size, offset in zip(self.specs, self._sizes, self._offsets, strict=True)
        ]


def padded_length(specs: Sequence[CacheSpec], max_context: int) -> int:
    """The smallest L above ``max_context`` for which every layer's slot is whole pages.

    So a slot can be given back without its neighbours, and windows of slots stay contiguous.
    """
    length = max_context + 1
    while any(s.num_kv_heads * length * s.head_dim * _ITEM % mmap.PAGESIZE for s in specs):
        length += 1
    return length
