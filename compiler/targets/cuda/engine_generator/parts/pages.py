"""Where keys and values lie on a GPU: pages of a few positions of all layers, taken and given."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings

PAGE = 64
"""Positions of a page."""

CHUNK = 256
"""Pages that memory grows by, fewer where they are large."""

CHUNK_BYTES = 1 << 30


class Pages:
    """Pages by number of elements from ``base``, which lets memory grow under captured graphs.

    A page holds ``[layers, 2, kv heads, PAGE, head_dim]``. The first chunk lives with the engine, a
    later one until its last page is given back.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        s = self._settings = settings
        self._device = device
        self.layer_size = 2 * s.num_kv_heads * PAGE * s.head_dim
        self.page_size = s.num_cached * self.layer_size
        self._chunk = max(1, min(CHUNK, CHUNK_BYTES // (self.page_size * s.dtype.itemsize)))
        self.base = self._allocate()
        self._chunks = {0: self.base}  # by the place of their first element
        self._free = {0: self._places(0)}

    def take(self, count: int) -> list[int]:
        """So many free pages; memory is allocated where there are not enough."""
        taken: list[int] = []
        while True:
            for free in self._free.values():
                while free and len(taken) < count:
                    taken.append(free.pop())
            if len(taken) == count:
                return taken
            try:
                chunk = self._allocate()
            except torch.OutOfMemoryError:
                self.give(taken)
                raise
            first = (chunk.data_ptr() - self.base.data_ptr()) // chunk.itemsize
            self._chunks[first], self._free[first] = chunk, self._places(first)

    def give(self, pages: list[int]) -> None:
        """Pages that nobody reads any more."""
        for page in pages:
            first = max(each for each in self._chunks if each <= page)
            self._free[first].append(page)
            if first and len(self._free[first]) == self._chunk:
                del self._chunks[first], self._free[first]

    def _allocate(self) -> Tensor:
        size = self._chunk * self.page_size
        return torch.empty(size, dtype=self._settings.dtype, device=self._device)

    def _places(self, first: int) -> list[int]:
        return [first + index * self.page_size for index in reversed(range(self._chunk))]
