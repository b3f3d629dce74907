"""The state of all seats on the device: pages and their tables, state per sequence, snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda.numerics import cache_kind
from tilewright.compiler.targets.cuda.pages import (
    PAGE,
    allocate_pages,
    page_bytes,
    pages_of,
)
from tilewright.compiler.targets.step import Pages, Seat, Snapshot


def sequence_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of what one sequence keeps whatever its length, float32."""
    return 4 * sum(each.num_elements(1) for each in specs)


class PagedState:
    """A pool of pages with a table of each seat's, and what each seat keeps whatever its length.

    ``pages``: the caches by layer. ``tables [S, M]`` int32: the pages of every seat. ``sequences``:
    float32 ``[S, ...]`` by layer, rewritten by every step; a sequence's counts from its position 0.
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
        self.sequences = {
            each.name: torch.zeros(options.max_batch, *each.shape, device=device)
            for each in sequence_specs
        }
        self._sequence_bytes = sequence_bytes(sequence_specs)
        self._held: dict[Seat, list[int]] = {}
        self._snapshots: dict[Snapshot, tuple[int, list[Tensor]]] = {}

    def note(self, edit: Pages) -> None:
        """Keep in mind which pages a seat has; :meth:`deal` writes them."""
        held = self._held.setdefault(edit.seat, [])
        held[edit.first :] = edit.ids
        width = self.tables.shape[1]
        assert len(held) <= width, f"seat {edit.seat} has {len(held)} pages of {width}"

    def deal(self, edits: Sequence[Pages]) -> None:
        """Write pages into seats' tables, in one go."""
        if not edits:
            return
        width = self.tables.shape[1]
        places: list[int] = []
        numbers: list[int] = []
        for edit in edits:
            places += [edit.seat * width + edit.first + at for at in range(len(edit.ids))]
            numbers += edit.ids
        both = torch.tensor([places, numbers])
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        self.tables.view(-1).index_copy_(0, both[0], both[1].to(torch.int32))

    def clear(self, seat: Seat) -> None:
        """A seat has no pages any more; what is queued on the device still comes first."""
        self._held.pop(seat, None)

    @torch.no_grad()
    def copy(self, source: Seat, target: Seat, num_positions: int) -> None:
        """The page that the first positions of a seat end in, and its own state, to another's."""
        if num_positions % PAGE:
            at = num_positions // PAGE
            old, new = self._held[source][at], self._held[target][at]
            for pages in self.pages.values():
                pages.values[new] = pages.values[old]
                if pages.exponents is not None:
                    pages.exponents[new] = pages.exponents[old]
        for state in self.sequences.values():
            state[target] = state[source]

    def save(self, seat: Seat, snapshot: Snapshot, position: int) -> None:
        """Keep what a seat has of state per sequence, as it is at ``position``."""
        if snapshot not in self._snapshots:
            kept = [torch.empty_like(state[0]) for state in self.sequences.values()]
        else:
            kept = self._snapshots[snapshot][1]
        for place, state in zip(kept, self.sequences.values(), strict=True):
            place.copy_(state[seat])
        self._snapshots[snapshot] = position, kept

    def load(self, seat: Seat, snapshot: Snapshot) -> int:
        """Put a snapshot into a seat; returns the position it was saved at."""
        position, kept = self._snapshots[snapshot]
        for place, state in zip(kept, self.sequences.values(), strict=True):
            state[seat].copy_(place)
        return position

    def num_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Bytes of the pages of so many positions, and of what their sequences keep besides."""
        a_page = sum(page_bytes(each, self._kinds[each.name]) for each in self._specs)
        return pages_of(num_positions) * a_page + num_sequences * self._sequence_bytes

    def num_bytes_held(self) -> int:
        """Bytes of what seats hold now; a page that several share counts once."""
        pages = {page for held in self._held.values() for page in held}
        return self.num_bytes(PAGE * len(pages), len(self._held))
