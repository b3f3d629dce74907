"""Key/value caches in contiguous slots, bound to ONNX Runtime by pointer.

Memory is reserved as address space and touched only where positions are written; a freed slot's
pages go back to the system at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from compiler.errors import CompileError
from compiler.targets.cpu.emit import CacheSpec

_ITEM = 4  # float32


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
        # private: the system keeps the pages of a shared mapping whatever it is advised
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, max(total, mmap.PAGESIZE), flags=kind)
        except OSError as error:
            raise CompileError(
                f"a cache of {total} bytes for {num_slots} sequences of {length} positions "
                f"({error.strerror}); allowed: fewer sequences or positions"
            ) from None
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)

    def bindings(self, first: int, last: int) -> list[tuple[str, tuple[int, ...], int]]:
        """Name, shape and address of every cache tensor for the slots ``first`` to ``last - 1``."""
        bound: list[tuple[str, tuple[int, ...], int]] = []
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            shape = (last - first, spec.num_kv_heads, self.length, spec.head_dim)
            for part, offset in zip(("key", "value"), offsets, strict=True):
                bound.append((f"{spec.name}.{part}", shape, self._address + offset + first * size))
        return bound

    def release(self, slot: int) -> None:
        """Give the pages of a slot back; it reads as zeros afterwards."""
        for size, offsets in zip(self._slot_bytes, self._offsets, strict=True):
            for offset in offsets:
                self._advise(offset + slot * size, size)

    def copy(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another."""
        for spec, size, offsets in zip(self.specs, self._slot_bytes, self._offsets, strict=True):
            count = spec.num_kv_heads * self.length * spec.head_dim
            for offset in offsets:
                views = [
                    self._bytes[offset + slot * size :][: count * _ITEM]
                    .view(np.float32)
                    .reshape(spec.num_kv_heads, self.length, spec.head_dim)
                    for slot in (source, target)
                ]
                views[1][:, :num_positions] = views[0][:, :num_positions]

    def num_bytes(self, num_positions: int) -> int:
        """Bytes that hold this many positions, of whatever sequences."""
        return sum(2 * s.num_kv_heads * s.head_dim * _ITEM * num_positions for s in self.specs)

    def _advise(self, start: int, size: int) -> None:
        if hasattr(self._mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, size)


def padded_length(specs: Sequence[CacheSpec], max_context: int) -> int:
    """The smallest L above ``max_context`` for which every layer's slot is whole pages.

    So a slot can be given back without its neighbours, and windows of slots stay contiguous.
    """
    length = max_context + 1
    while any(s.num_kv_heads * length * s.head_dim * _ITEM % mmap.PAGESIZE for s in specs):
        length += 1
    return length
