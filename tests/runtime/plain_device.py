"""What steps make of a device's seats, pages and snapshots, as lists of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    Back,
    Close,
    Copy,
    Drop,
    Edit,
    Load,
    Open,
    Out,
    Pages,
    Save,
    Seat,
)


@dataclass(slots=True)
class PlainSeat:
    """The tokens that a seat's state holds, the one it reads next, and its pages."""

    tokens: list[int] = field(default_factory=list)
    state: list[int] | None = None
    holds: int | None = None
    num_shared: int = 0
    pages: list[int] = field(default_factory=list)


class PlainDevice:
    """Applies steps to lists of tokens, and fails where a step breaks a rule."""

    def __init__(self, limits: Capabilities) -> None:
        self.limits = limits
        self.seats: dict[Seat, PlainSeat] = {}
        self.users: Counter[int] = Counter()
        self.content: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        self.away: dict[int, PlainSeat] = {}

    def clear(self) -> None:
        """Nothing is held any more."""
        for kept in (self.seats, self.users, self.content, self.snapshots, self.away):
            kept.clear()

    def apply(self, edit: Edit) -> None:
        """One edit."""
        if isinstance(edit, Open):
            self._open(edit)
        elif isinstance(edit, Close):
            self.users.subtract(self.seats.pop(edit.seat).pages)
        elif isinstance(edit, Pages):
            seat = self.seats[edit.seat]
            assert edit.first == len(seat.pages) and not set(edit.ids) & set(seat.pages)
            seat.pages += edit.ids
            self._find_shared(seat)
            self.users.update(edit.ids)
        elif isinstance(edit, Save):
            self.snapshots[edit.snapshot] = list(self.seats[edit.seat].tokens)
            assert self.seats[edit.seat].state == self.snapshots[edit.snapshot]
        elif isinstance(edit, Load):
            seat = self.seats[edit.seat]
            seat.state = list(self.snapshots[edit.snapshot])
            assert seat.tokens == seat.state, "a snapshot of another sequence"
        elif isinstance(edit, Copy):
            self.copy(edit.source, edit.target, edit.num_positions)
        elif isinstance(edit, Out):
            seat = self.seats[edit.seat]
            assert edit.place not in self.away
            self.away[edit.place] = PlainSeat(list(seat.tokens), seat.state, seat.holds)
        elif isinstance(edit, Back):
            kept, seat = self.away.pop(edit.place), self.seats[edit.seat]
            seat.tokens, seat.state, seat.holds = [], None, kept.holds
            for token in kept.tokens:
                self.write(edit.seat, token, is_new=False)
            seat.state = kept.state
        else:
            assert isinstance(edit, Drop)
            del self.away[edit.place]

    def _open(self, edit: Open) -> None:
        held = self.seats.get(edit.seat)
        is_kept = edit.keeps > 0 and not self.limits.page_size
        assert (held is not None) == is_kept and edit.seat < self.limits.max_seats
        fresh = PlainSeat(num_shared=0 if is_kept else edit.keeps)
        if held is not None:
            assert edit.keeps <= len(held.tokens)
            fresh.tokens = held.tokens[: edit.keeps]
            fresh.state = held.state if held.state == fresh.tokens else None
        self.seats[edit.seat] = fresh

    def _find_shared(self, seat: PlainSeat) -> None:
        """What the pages hold that are computed already."""
        size, count = self.limits.page_size, seat.num_shared
        if count > len(seat.tokens):
            assert not seat.tokens and count % size == 0
            whole = [self.content[page] for page in seat.pages[: count // size]]
            assert all(len(content) == size for content in whole), "a page that is not full"
            seat.tokens = [token for content in whole for token in content]

    def copy(self, source: Seat, target: Seat, num_positions: int) -> None:
        """The first positions of a seat become another's."""
        old, new = self.seats[source], self.seats[target]
        assert num_positions <= len(old.tokens)
        if size := self.limits.page_size:
            whole = num_positions // size
            assert old.pages[:whole] == new.pages[:whole], "whole pages are shared"
            if num_positions % size:
                self.content[new.pages[whole]] = old.tokens[whole * size : num_positions]
        new.tokens = old.tokens[:num_positions]
        new.state = old.state if old.state == new.tokens else None

    def write(
        self, number: Seat, token: int, *, is_new: bool = True, also: Sequence[Seat] = ()
    ) -> None:
        """A seat's state goes on by a token; ``also``: seats that copy it behind this step."""
        seat = self.seats[number]
        if self.limits.has_sequence_state and is_new:
            assert (seat.state or []) == seat.tokens, "the state of another position"
        at, size = len(seat.tokens), self.limits.page_size
        if size:
            page = seat.pages[at // size]
            num_others = sum(page in self.seats[seat].pages for seat in also)
            assert self.users[page] == 1 + num_others, "a page of several seats is written"
            held = self.content.setdefault(page, []) if at % size else []
            self.content[page] = [*held[: at % size], token]
        seat.tokens.append(token)
        if self.limits.has_sequence_state and is_new:
            seat.state = list(seat.tokens)
