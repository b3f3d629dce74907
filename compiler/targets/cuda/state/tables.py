"""The state of all slots on the device: pages and their tables, state per sequence, snapshots."""

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
    HostPlace,
    PrefillChunk,
    Slot,
    Snapshot,
)


def sequence_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of what one sequence keeps whatever its length, float32."""
    return 4 * sum(each.num_elements(1) for each in specs)


class PagedState:
    """A pool of pages with a table of each slot's, and what each slot keeps whatever its length.

    ``pages``: the caches by layer. ``tables [S, M]`` int32: the pages of every slot. ``sequences``:
    float32 ``[S + num_marks, ...]`` by layer, rewritten by every step; a sequence's counts from its
    position 0. The last ones are nobody's: what a prompt's pass keeps at its marks, and
    ``num_draft_states`` states after drafts, from ``first_draft_state``.
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
        num_draft_states: int = 0,
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
        self._flat_tables = self.tables.view(-1)
        self.sequences = {
            each.name: torch.zeros(
                options.max_batch + num_marks + num_draft_states, *each.shape, device=device
            )
            for each in sequence_specs
        }
        self._first_mark, self.num_marks = options.max_batch, num_marks
        self.first_draft_state = options.max_batch + num_marks
        self.num_draft_states = num_draft_states
        self._sequence_bytes = sequence_bytes(sequence_specs)
        self._held: dict[Slot, list[int]] = {}
        self._room = np.zeros(options.max_batch, dtype=np.int64)  # positions in a slot's pages
        self._snapshots: dict[Snapshot, tuple[int, list[Tensor]]] = {}
        self._places: dict[HostPlace, list[Tensor]] = {}

    def note(self, edit: AssignPages) -> None:
        """Keep in mind which pages a slot has; :meth:`deal` writes them."""
        held = self._held.setdefault(edit.slot, [])
        assert edit.first <= len(held), f"slot {edit.slot} has no page before {edit.first}"
        held[edit.first :] = edit.ids
        width = self.tables.shape[1]
        assert len(held) <= width, f"slot {edit.slot} has {len(held)} pages of {width}"
        self._room[edit.slot] = PAGE * len(held)

    def deal(self, edits: Sequence[AssignPages]) -> None:
        """Write pages into slots' tables, in one go; of two for one place the last counts."""
        width = self.tables.shape[1]
        if len(edits) == 1:  # a single copy, and nothing else
            (edit,) = edits
            first = edit.slot * width + edit.first
            places = self._flat_tables[first : first + len(edit.ids)]
            send_into(places, np.array(edit.ids, dtype=np.int32))
            return
        pages = {
            edit.slot * width + at: page
            for edit in edits
            for at, page in enumerate(edit.ids, edit.first)
        }
        if not pages:
            return
        both = np.array([list(pages), [0] * len(pages)], dtype=np.int64)
        both[1].view(np.int32)[: len(pages)] = [*pages.values()]
        places, ids = send(both, self.device)
        self._flat_tables.index_copy_(0, places, ids.view(torch.int32)[: len(pages)])

    def check(self, slot: Slot, end: int) -> None:
        """Positions before ``end`` are in pages of the slot's own: what the table names behind them
        may be another's by now.
        """
        room = int(self._room[slot])
        assert end <= room or not self.pages, f"slot {slot} has pages up to {room}, not {end}"

    def check_all(self, slots: Sequence[Slot], ends: np.ndarray) -> int:
        """:meth:`check`, of several slots; the positions that each of them has left at least."""
        if not self.pages:
            return sys.maxsize
        free = int((self._room[list(slots)] - ends).min(initial=sys.maxsize))
        if free < 0:
            for slot, end in zip(slots, ends.tolist(), strict=True):
                self.check(slot, end)
        return free

    def clear(self, slot: Slot) -> None:
        """A slot has no pages any more; what is queued on the device still comes first."""
        self._held.pop(slot, None)
        self._room[slot] = 0

    @torch.no_grad()
    def copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """The page that the first positions of a slot end in, and its own state, to another's."""
        if num_positions % PAGE:
            at = num_positions // PAGE
            old, new = self._held[source][at], self._held[target][at]
            for pool in self._pools():
                pool[new] = pool[old]
        _copy_all(self._own(source), self._own(target))

    def accept(self, source: int, slot: Slot) -> None:
        """Copy a state after drafts to its slot."""
        _copy_all(self._own(source), self._own(slot))

    def save(self, slot: Slot, snapshot: Snapshot, position: int) -> None:
        """Keep what a slot has of state per sequence, as it is at ``position``."""
        if snapshot not in self._snapshots:
            kept = [torch.empty_like(state[0]) for state in self.sequences.values()]
        else:
            kept = self._snapshots[snapshot][1]
        _copy_all(self._own(slot), kept)
        self._snapshots[snapshot] = position, kept

    def marks(self, chunks: Sequence[PrefillChunk]) -> Marks:
        """Where the pass of these pieces is to keep their states inside of them."""
        found = marks_of(chunks, self._first_mark)
        assert len(found) <= self.num_marks, f"{len(found)} marks in one pass"
        return found

    def keep(self, chunks: Sequence[PrefillChunk]) -> None:
        """Take the snapshots of pieces whose pass has run with :meth:`marks`."""
        marks = self.marks(chunks)
        for chunk in chunks:
            for at, snapshot in chunk.saves:
                self.save(marks.get((chunk.slot, at), chunk.slot), snapshot, at)

    def load(self, slot: Slot, snapshot: Snapshot) -> int:
        """Put a snapshot into a slot; returns the position it was saved at."""
        position, kept = self._snapshots[snapshot]
        _copy_all(kept, self._own(slot))
        return position

    def put_out(self, slot: Slot, place: HostPlace, num_positions: int) -> None:
        """Copy the pages of a slot's first positions, and its own state, to host memory."""
        ids = self._ids(self._held[slot][: pages_of(num_positions)])
        kept = [_to_host(each.index_select(0, ids)) for each in self._pools()]
        kept += [_to_host(state) for state in self._own(slot)]
        self._places[place] = kept

    def take_back(self, place: HostPlace, slot: Slot, num_positions: int) -> None:
        """Copy what :meth:`put_out` kept into the pages and the state of a slot, and forget it."""
        kept = iter(self._places.pop(place))
        ids = self._ids(self._held[slot][: pages_of(num_positions)])
        for pool in self._pools():
            pool.index_copy_(0, ids, next(kept).to(self.device, non_blocking=True))
        for state in self._own(slot):
            state.copy_(next(kept), non_blocking=True)

    def drop(self, place: HostPlace) -> None:
        """Free the host memory in which :meth:`put_out` kept a slot's state."""
        del self._places[place]

    def reset(self) -> None:
        """Forget whose the pages are, and all that was kept."""
        self._held.clear()
        self._room.fill(0)
        self._snapshots.clear()
        self._places.clear()

    def _own(self, slot: int) -> list[Tensor]:
        """What a slot keeps whatever its length, by layer."""
        return [state[slot] for state in self.sequences.values()]

    def _pools(self) -> list[Tensor]:
        """Tensors with a row a page: values and exponents of every layer."""
        both = [(each.values, each.exponents) for each in self.pages.values()]
        return [each for pair in both for each in pair if each is not None]

    def _ids(self, pages: Sequence[int]) -> Tensor:
        return send(np.array(pages, dtype=np.int64), self.device)

    def num_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Bytes of the pages of so many positions, and of what their sequences keep besides."""
        a_page = sum(page_bytes(each, self._kinds[each.name]) for each in self._specs)
        return pages_of(num_positions) * a_page + num_sequences * self._sequence_bytes

    def num_bytes_held(self) -> int:
        """Bytes on the device of what slots and snapshots hold now; a page that several share
        counts once.
        """
        pages = {page for held in self._held.values() for page in held}
        return self.num_bytes(PAGE * len(pages), len(self._held) + len(self._snapshots))


def _copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors into others of their shapes, in a launch or two: of 35B-A3B they are 60."""
    if sources:
        torch._foreach_copy_(targets, sources)


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU, behind what is queued there."""
    kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return kept.copy_(values, non_blocking=True)
