"""Device state of all slots: pages, page tables, per-sequence state and snapshots."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.cuda.numerics import cache_kind
from tilewright.compiler.targets.cuda.state.pages import (
    PAGE,
    allocate_pages,
    page_bytes,
    pages_of,
)
from tilewright.compiler.targets.cuda.state.slot_table import send, send_into
from tilewright.compiler.targets.cuda.state.snapshot_positions import Marks, marks_of
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    PrefillChunk,
    Slot,
    StateSnapshot,
    SwapHandle,
)


def sequence_bytes(specs: Sequence[StateSpec]) -> int:
    """Return the size of one sequence's fixed-size state in bytes (float32)."""
    return 4 * sum(each.num_elements(1) for each in specs)


_MAX_ENTRIES = 1 << 16
"""Maximum entries of a copy with several page assignments."""


class PagedState:
    """A page pool with a page table for each slot, and fixed-size state for each slot.

    ``pages``: the caches by layer. ``tables [S, M]`` int32: every slot's pages. ``sequences``:
    float32 ``[S + num_marks, ...]`` by layer, rewritten by every step; a sequence's counts from its
    position 0. The last ones are nobody's: what a prompt's pass keeps at its marks.
    Whose page is whose is the runtime's to say.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        options: CompileOptions,
        device: torch.device,
        *,
        num_pages: int,
        sequence_specs: Sequence[StateSpec] = (),
        num_marks: int = 0,
    ) -> None:
        exact = options.compute == "exact"
        self.device, self.num_pages, self._specs = device, num_pages, specs
        self._kinds = {each.name: cache_kind(each.format, exact=exact) for each in specs}
        self.pages = {
            each.name: allocate_pages(
                num_pages, *each.shape[1:], kind=self._kinds[each.name], device=device
            )
            for each in specs
        }
        shape = (options.max_batch, pages_of(options.max_context))
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host_tables = np.zeros(self.tables.numel(), dtype=np.int32)
        self.sequences = {
            each.name: torch.zeros(options.max_batch + num_marks, *each.shape, device=device)
            for each in sequence_specs
        }
        self._first_mark, self.num_marks = options.max_batch, num_marks
        self._sequence_bytes = sequence_bytes(sequence_specs)
        self._pages_of_slot: dict[Slot, list[int]] = {}
        # capacity of a slot's pages in positions
        self._room = np.zeros(options.max_batch, dtype=np.int64)
        self._snapshots: dict[StateSnapshot, tuple[int, list[Tensor]]] = {}
        self._places: dict[SwapHandle, list[Tensor]] = {}

    def note(self, edit: AssignPages) -> None:
        """Record a slot's pages. :meth:`deal` writes them to the device."""
        page_ids = self._pages_of_slot.setdefault(edit.slot, [])
        assert edit.first <= len(page_ids), f"slot {edit.slot} has no page before {edit.first}"
        page_ids[edit.first :] = edit.ids
        width = self.tables.shape[1]
        assert len(page_ids) <= width, f"slot {edit.slot} has {len(page_ids)} pages of {width}"
        self._room[edit.slot] = PAGE * len(page_ids)

    def assign(self, edits: Sequence[AssignPages]) -> None:
        """Record pages and write them to the device."""
        for edit in edits:
            self.note(edit)
        self.deal(edits)

    def deal(self, edits: Sequence[AssignPages]) -> None:
        """Write page assignments to the page tables. Later assignments take precedence.

        One copy writes the range that contains all changes, if it is short.
        """
        width, ranges = self.tables.shape[1], []
        for edit in edits:
            first = edit.slot * width + edit.first
            last = first + len(edit.ids)
            self._host_tables[first:last] = edit.ids
            ranges.append((first, last))
        if ranges:
            low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
            ranges = [(low, high)] if high - low <= _MAX_ENTRIES else ranges
        for first, last in ranges:
            send_into(self.tables, self._host_tables[first:last], first=first)

    def check(self, slot: Slot, end: int) -> None:
        """Check that a slot's pages contain all positions before ``end``.

        Table entries after its pages are stale and may name pages of other slots.
        """
        room = int(self._room[slot])
        assert end <= room or not self.pages, f"slot {slot} has pages up to {room}, not {end}"

    def capacity(self, slot: Slot) -> int:
        """Return the number of positions in a slot's pages."""
        return int(self._room[slot])

    def check_all(self, slots: Sequence[Slot] | np.ndarray, ends: np.ndarray) -> int:
        """Apply :meth:`check` to several slots. Return the minimum free position count."""
        if not self.pages:
            return sys.maxsize
        free = int((self._room[np.asarray(slots)] - ends).min(initial=sys.maxsize))
        if free < 0:
            for slot, end in zip(slots, ends.tolist(), strict=True):
                self.check(slot, end)
        return free

    def clear(self, slot: Slot) -> None:
        """Remove a slot's pages. Queued device work may still use them."""
        self._pages_of_slot.pop(slot, None)
        self._room[slot] = 0

    @torch.no_grad()
    def copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Copy a sequence's partial last page and fixed-size state to another slot."""
        if num_positions % PAGE:
            at = num_positions // PAGE
            old, new = self._pages_of_slot[source][at], self._pages_of_slot[target][at]
            for pool in self._pools():
                pool[new] = pool[old]
        _copy_all(self._own(source), self._own(target))

    def save(self, slot: Slot, snapshot: StateSnapshot, position: int) -> None:
        """Save a slot's fixed-size state at ``position`` as a snapshot."""
        if snapshot not in self._snapshots:
            kept = [torch.empty_like(state[0]) for state in self.sequences.values()]
        else:
            kept = self._snapshots[snapshot][1]
        _copy_all(self._own(slot), kept)
        self._snapshots[snapshot] = position, kept

    def marks(self, chunks: Sequence[PrefillChunk]) -> Marks:
        """Return the snapshot positions inside these chunks, with the index of each state
        buffer.
        """
        found = marks_of(chunks, self._first_mark)
        assert len(found) <= self.num_marks, f"{len(found)} marks in one pass"
        return found

    def keep(self, chunks: Sequence[PrefillChunk]) -> None:
        """Save the chunk snapshots after their forward with :meth:`marks`."""
        marks = self.marks(chunks)
        for chunk in chunks:
            for at, snapshot in chunk.saves:
                self.save(marks.get((chunk.slot, at), chunk.slot), snapshot, at)

    def load(self, slot: Slot, snapshot: StateSnapshot) -> int:
        """Load a snapshot into a slot. Return its position."""
        position, kept = self._snapshots[snapshot]
        _copy_all(kept, self._own(slot))
        return position

    def put_out(self, slot: Slot, place: SwapHandle, num_positions: int) -> None:
        """Copy the pages of a slot's first positions, and its fixed-size state, to host memory."""
        ids = self._ids(self._pages_of_slot[slot][: pages_of(num_positions)])
        kept = [_to_host(each.index_select(0, ids)) for each in self._pools()]
        kept += [_to_host(state) for state in self._own(slot)]
        self._places[place] = kept

    def take_back(self, place: SwapHandle, slot: Slot, num_positions: int) -> None:
        """Copy the state from :meth:`put_out` back to a slot and free the host memory."""
        kept = iter(self._places.pop(place))
        ids = self._ids(self._pages_of_slot[slot][: pages_of(num_positions)])
        for pool in self._pools():
            pool.index_copy_(0, ids, next(kept).to(self.device, non_blocking=True))
        for state in self._own(slot):
            state.copy_(next(kept), non_blocking=True)

    def drop(self, place: SwapHandle) -> None:
        """Free host memory from :meth:`put_out`."""
        del self._places[place]

    def reset(self) -> None:
        """Remove all page assignments, snapshots and host copies."""
        self._pages_of_slot.clear()
        self._room.fill(0)
        self._snapshots.clear()
        self._places.clear()

    def _own(self, slot: int) -> list[Tensor]:
        """Return a slot's fixed-size state by layer."""
        return [state[slot] for state in self.sequences.values()]

    def _pools(self) -> list[Tensor]:
        """Return the tensors indexed by page: values and exponents of every layer."""
        both = [(each.values, each.exponents) for each in self.pages.values()]
        return [each for pair in both for each in pair if each is not None]

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return send(np.array(pages, dtype=np.int64), self.device)

    def num_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Return the bytes of pages for ``num_positions``, and of fixed-size states."""
        a_page = sum(page_bytes(each, self._kinds[each.name]) for each in self._specs)
        return pages_of(num_positions) * a_page + num_sequences * self._sequence_bytes

    def num_used_bytes(self) -> int:
        """Return the device bytes in use by slots and snapshots. Shared pages count once."""
        pages = {page for page_ids in self._pages_of_slot.values() for page in page_ids}
        return self.num_bytes(PAGE * len(pages), len(self._pages_of_slot) + len(self._snapshots))


def _copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors to tensors of the same shapes in a few launches. Large models have dozens of
    tensors.
    """
    if sources:
        torch._foreach_copy_(targets, sources)


def _to_host(values: Tensor) -> Tensor:
    """Return a copy in host memory, pinned with a GPU, after all queued work."""
    kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return kept.copy_(values, non_blocking=True)
