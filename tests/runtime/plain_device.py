"""What steps make of a device's slots, pages and snapshots, as lists of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    CopyState,
    DropSwapped,
    LoadState,
    OpenSlot,
    SaveState,
    Slot,
    StateUpdate,
    SwapIn,
    SwapOut,
)


@dataclass(slots=True)
class PlainSlot:
    """The tokens that a slot's state holds, the one it reads next, and its pages."""

    tokens: list[int] = field(default_factory=list)
    state: list[int] | None = None
    holds: int | None = None
    num_shared: int = 0
    pages: list[int] = field(default_factory=list)


class PlainDevice:
    """Applies steps to lists of tokens, and fails where a step breaks a rule."""

    def __init__(self, limits: Capabilities) -> None:
        self.limits = limits
        self.slots: dict[Slot, PlainSlot] = {}
        self.users: Counter[int] = Counter()
        self.content: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        self.away: dict[int, PlainSlot] = {}

    def clear(self) -> None:
        """Nothing is held any more."""
        for kept in (self.slots, self.users, self.content, self.snapshots, self.away):
            kept.clear()

    def apply(self, edit: StateUpdate) -> None:
        """One edit."""
        if isinstance(edit, OpenSlot):
            self._open(edit)
        elif isinstance(edit, CloseSlot):
            self.users.subtract(self.slots.pop(edit.slot).pages)
        elif isinstance(edit, AssignPages):
            slot = self.slots[edit.slot]
            assert edit.first == len(slot.pages) and not set(edit.ids) & set(slot.pages)
            slot.pages += edit.ids
            self._find_shared(slot)
            self.users.update(edit.ids)
        elif isinstance(edit, SaveState):
            self.snapshots[edit.snapshot] = list(self.slots[edit.slot].tokens)
            assert self.slots[edit.slot].state == self.snapshots[edit.snapshot]
        elif isinstance(edit, LoadState):
            slot = self.slots[edit.slot]
            slot.state = list(self.snapshots[edit.snapshot])
            assert slot.tokens == slot.state, "a snapshot of another sequence"
        elif isinstance(edit, CopyState):
            self.copy(edit.source, edit.target, edit.num_positions)
        elif isinstance(edit, SwapOut):
            slot = self.slots[edit.slot]
            assert edit.place not in self.away
            self.away[edit.place] = PlainSlot(list(slot.tokens), slot.state, slot.holds)
        elif isinstance(edit, SwapIn):
            kept, slot = self.away.pop(edit.place), self.slots[edit.slot]
            slot.tokens, slot.state, slot.holds = [], None, kept.holds
            for token in kept.tokens:
                self.write(edit.slot, token, is_new=False)
            slot.state = kept.state
        else:
            assert isinstance(edit, DropSwapped)
            del self.away[edit.place]

    def _open(self, edit: OpenSlot) -> None:
        held = self.slots.get(edit.slot)
        is_kept = edit.keeps > 0 and not self.limits.page_size
        assert (held is not None) == is_kept and edit.slot < self.limits.max_num_seqs
        fresh = PlainSlot(num_shared=0 if is_kept else edit.keeps)
        if held is not None:
            assert edit.keeps <= len(held.tokens)
            fresh.tokens = held.tokens[: edit.keeps]
            fresh.state = held.state if held.state == fresh.tokens else None
        self.slots[edit.slot] = fresh

    def _find_shared(self, slot: PlainSlot) -> None:
        """What the pages hold that are computed already."""
        size, count = self.limits.page_size, slot.num_shared
        if count > len(slot.tokens):
            assert not slot.tokens and count % size == 0
            whole = [self.content[page] for page in slot.pages[: count // size]]
            assert all(len(content) == size for content in whole), "a page that is not full"
            slot.tokens = [token for content in whole for token in content]

    def copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """The first positions of a slot become another's."""
        old, new = self.slots[source], self.slots[target]
        assert num_positions <= len(old.tokens)
        if size := self.limits.page_size:
            whole = num_positions // size
            assert old.pages[:whole] == new.pages[:whole], "whole pages are shared"
            if num_positions % size:
                self.content[new.pages[whole]] = old.tokens[whole * size : num_positions]
        new.tokens = old.tokens[:num_positions]
        new.state = old.state if old.state == new.tokens else None

    def write(
        self, number: Slot, token: int, *, is_new: bool = True, also: Sequence[Slot] = ()
    ) -> None:
        """A slot's state goes on by a token; ``also``: slots that copy it behind this step."""
        slot = self.slots[number]
        if self.limits.has_sequence_state and is_new:
            assert (slot.state or []) == slot.tokens, "the state of another position"
        at, size = len(slot.tokens), self.limits.page_size
        if size:
            page = slot.pages[at // size]
            num_others = sum(page in self.slots[slot].pages for slot in also)
            assert self.users[page] == 1 + num_others, "a page of several slots is written"
            held = self.content.setdefault(page, []) if at % size else []
            self.content[page] = [*held[: at % size], token]
        slot.tokens.append(token)
        if self.limits.has_sequence_state and is_new:
            slot.state = list(slot.tokens)
