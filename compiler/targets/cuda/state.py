"""The state of all sequences: which slot and which pages each has, and copies between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiler.errors import RequestError
from compiler.ir.state import StateSpec
from compiler.targets.base import CompileOptions, StateHandle
from compiler.targets.cuda.numerics import cache_kind
from compiler.targets.cuda.pages import PAGE, PagePool, allocate_pages, page_bytes, pages_of
from compiler.targets.slots import SlotPool


class PagedState:
    """Slots with block tables over a pool of pages, with room for every slot at full length.

    ``pages``: the caches by layer. ``tables [S, M]`` int32: the pages of every slot.
    """

    def __init__(
        self, specs: Sequence[StateSpec], options: CompileOptions, device: torch.device
    ) -> None:
        exact = options.compute == "exact"
        pages_each = pages_of(options.max_context)
        num_pages = options.max_batch * pages_each
        self.device, self._specs, self._max_context = device, specs, options.max_context
        self._kinds = {each.name: cache_kind(each.format, exact=exact) for each in specs}
        self.pages = {
            each.name: allocate_pages(
                num_pages, *each.shape[1:], kind=self._kinds[each.name], device=device
            )
            for each in specs
        }
        shape = (options.max_batch, pages_each)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._pool = PagePool(num_pages)
        self._taken: dict[StateHandle, list[int]] = {}

    def __contains__(self, handle: object) -> bool:
        return handle in self._slots

    def reserve(self, num_positions: int) -> StateHandle:
        """A slot and its pages.

        Raises:
            RequestError: when the sequence is too long, or nothing is free.
        """
        handle = self._slots.reserve(num_positions)
        try:
            pages = self._pool.take(pages_of(num_positions))
        except RequestError:
            self._slots.free(handle)
            raise
        self._taken[handle] = pages
        self.tables[handle, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return handle

    def free(self, handle: StateHandle) -> None:
        """Give slot and pages back; what is queued on the device still comes before later use."""
        self._slots.free(handle)
        self._pool.give(self._taken.pop(handle))

    @torch.no_grad()
    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        """A new sequence with the first ``num_positions`` of this one's."""
        fresh = self.reserve(self._max_context)
        count = pages_of(num_positions)
        source, target = (
            torch.tensor(self._taken[each][:count], dtype=torch.int64, device=self.device)
            for each in (handle, fresh)
        )
        for pages in self.pages.values():
            pages.values[target] = pages.values[source]
            if pages.exponents is not None:
                pages.exponents[target] = pages.exponents[source]
        return fresh

    def num_free(self) -> int:
        """How many more sequences can be reserved."""
        return self._slots.num_free()

    def num_bytes(self, num_positions: int) -> int:
        """Bytes of the pages of so many positions."""
        a_page = sum(page_bytes(each, self._kinds[each.name]) for each in self._specs)
        return pages_of(num_positions) * a_page

    def num_bytes_taken(self) -> int:
        """Bytes of the pages that sequences hold now."""
        return self.num_bytes(PAGE * sum(len(pages) for pages in self._taken.values()))
