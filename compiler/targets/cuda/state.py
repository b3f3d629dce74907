"""The state of all sequences: which slot and which pages each has, and copies between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.compiler.errors import RequestError
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.base import CompileOptions, StateHandle
from tilewright.compiler.targets.cuda.numerics import cache_kind
from tilewright.compiler.targets.cuda.pages import (
    PAGE,
    PagePool,
    allocate_pages,
    page_bytes,
    pages_of,
)
from tilewright.compiler.targets.slots import SlotPool, check_copy


def sequence_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of what one sequence keeps whatever its length, float32."""
    return 4 * sum(each.num_elements(1) for each in specs)


class PagedState:
    """Slots with block tables over a pool of pages, with room for every slot at full length; and
    what each slot keeps whatever its sequence's length.

    ``pages``: the caches by layer. ``tables [S, M]`` int32: the pages of every slot. ``sequences``:
    float32 ``[S, ...]`` by layer, rewritten by every step; a sequence's counts from its position 0.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        options: CompileOptions,
        device: torch.device,
        *,
        sequence_specs: Sequence[StateSpec] = (),
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
        self.sequences = {
            each.name: torch.zeros(options.max_batch, *each.shape, device=device)
            for each in sequence_specs
        }
        self._sequence_bytes = sequence_bytes(sequence_specs)
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._pool = PagePool(num_pages)
        self._taken: dict[StateHandle, list[int]] = {}
        self._lengths: dict[StateHandle, int] = {}

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
        self._taken[handle], self._lengths[handle] = pages, 0
        self.tables[handle, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return handle

    def free(self, handle: StateHandle) -> None:
        """Give slot and pages back; what is queued on the device still comes before later use."""
        self._slots.free(handle)
        self._pool.give(self._taken.pop(handle))
        del self._lengths[handle]

    def ran(self, handle: StateHandle, length: int) -> None:
        """A step, maybe still queued, leaves a sequence with so many positions."""
        self._lengths[handle] = length

    def length(self, handle: StateHandle) -> int:
        """The positions that steps have run, queued ones included."""
        return self._lengths[handle]

    @torch.no_grad()
    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        """A new sequence with the first ``num_positions`` of this one's.

        Raises:
            RequestError: when nothing is free, or where a state would have to be cut back.
        """
        if self.sequences:
            check_copy(num_positions, self._lengths[handle])
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
        for state in self.sequences.values():
            state[fresh] = state[handle]
        self.ran(fresh, num_positions)
        return fresh

    def num_free(self) -> int:
        """How many more sequences can be reserved."""
        return self._slots.num_free()

    def num_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Bytes of the pages of so many positions, and of what their sequences keep besides."""
        a_page = sum(page_bytes(each, self._kinds[each.name]) for each in self._specs)
        return pages_of(num_positions) * a_page + num_sequences * self._sequence_bytes

    def num_bytes_taken(self) -> int:
        """Bytes of what sequences hold now."""
        return sum(self.num_bytes(PAGE * len(pages)) for pages in self._taken.values())
