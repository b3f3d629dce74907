"""Slots with state in host memory, with their next token and length."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from torch import Tensor

from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.step import (
    DropSwapped,
    Slot,
    SwapHandle,
    SwapIn,
    SwapOut,
)


class SwappedSlots:
    """State of swapped slots by handle. ``slot_states`` is the executable's.

    Their next tokens stay on the device, because the sampling step may still be queued.
    """

    def __init__(
        self, slot_states: MutableMapping[Slot, SlotState], state: PagedState, table: SlotTable
    ) -> None:
        self._slot_states, self._state, self._table = slot_states, state, table
        self._kept: dict[SwapHandle, tuple[SlotState, Tensor]] = {}

    def apply(self, edit: SwapOut | SwapIn | DropSwapped) -> None:
        """Swap a slot out or in, or drop a swapped slot."""
        if isinstance(edit, DropSwapped):
            del self._kept[edit.place]
            self._state.drop(edit.place)
            return
        slot_state = self._slot_states[edit.slot]
        if isinstance(edit, SwapOut):
            kept = replace(slot_state, counts=dict(slot_state.counts))
            self._kept[edit.place] = kept, self._table.tokens[edit.slot].clone()
            self._state.put_out(edit.slot, edit.place, slot_state.length)
            return
        kept, token = self._kept.pop(edit.place)
        slot_state.length, slot_state.token, slot_state.counts = (
            kept.length,
            kept.token,
            kept.counts,
        )
        slot_state.images, slot_state.hidden = kept.images, kept.hidden
        self._table.hold(edit.slot, token.view(1))
        self._state.take_back(edit.place, edit.slot, kept.length)

    def forget(self) -> None:
        """Drop all swapped slots."""
        self._kept.clear()
