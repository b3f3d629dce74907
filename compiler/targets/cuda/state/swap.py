"""Seats whose state is in host memory: what they read next and how far they are goes with it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from torch import Tensor

from tilewright.compiler.targets.cuda.state.slot_table import SeatTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.host.executable import Sitting
from tilewright.compiler.targets.interface.step import Back, Drop, HostPlace, Out, Seat


class Away:
    """What seats were when they were put out, by place; ``sittings`` are those of the executable.

    The tokens they hold stay on the device, where the step that chooses them may still be queued.
    """

    def __init__(
        self, sittings: MutableMapping[Seat, Sitting], state: PagedState, table: SeatTable
    ) -> None:
        self._sittings, self._state, self._table = sittings, state, table
        self._kept: dict[HostPlace, tuple[Sitting, Tensor]] = {}

    def apply(self, edit: Out | Back | Drop) -> None:
        """Put a seat out, take one back, or forget one."""
        if isinstance(edit, Drop):
            del self._kept[edit.place]
            self._state.drop(edit.place)
            return
        sitting = self._sittings[edit.seat]
        if isinstance(edit, Out):
            kept = replace(sitting, counts=dict(sitting.counts))
            self._kept[edit.place] = kept, self._table.tokens[edit.seat].clone()
            self._state.put_out(edit.seat, edit.place, sitting.length)
            return
        kept, token = self._kept.pop(edit.place)
        sitting.length, sitting.token, sitting.counts = kept.length, kept.token, kept.counts
        self._table.hold(edit.seat, token.view(1))
        self._state.take_back(edit.place, edit.seat, kept.length)

    def forget(self) -> None:
        """Forget every state that is kept in host memory."""
        self._kept.clear()
