"""Rows of a masked step, chosen on the device once it has the masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.choice import Choice, Drawing, drawing_of, make_choice
from tilewright.compiler.targets.cuda.group import Group
from tilewright.compiler.targets.cuda.readings import Ends, Readings
from tilewright.compiler.targets.cuda.seats import SeatTable, send
from tilewright.compiler.targets.step import Choosing, Chosen, Seat


def needs_host(choosing: Choosing) -> bool:
    """Whether a captured step cannot choose these tokens."""
    return choosing.changes_logits


def choice_of(
    table: SeatTable,
    seats: Sequence[Seat],
    positions: Sequence[int],
    width: int,
    group: Group | None = None,
) -> Choice:
    """How tokens that will stand at ``positions`` are chosen for seats, outside of a graph."""
    device = table.device
    tokens = torch.zeros(len(seats), dtype=torch.int64, device=device)
    choice = make_choice(len(seats), width, table.num_ends, tokens, group=group)
    choice.gather(table, table.index(seats))
    choice.positions.copy_(send(torch.tensor(positions), device))
    return choice


def choose_now(
    table: SeatTable,
    seats: Sequence[Seat],
    positions: Sequence[int],
    width: int,
    logits: Tensor,
    choosing: Sequence[Choosing],
    group: Group | None = None,
) -> Choice:
    """:func:`choice_of`, of ``logits [R, V]``, which are for these seats."""
    choice = choice_of(table, seats, positions, width, group)
    choice.apply(logits, drawing_of(choosing))
    return choice


@dataclass(slots=True)
class DeviceChoice:
    """R seats whose tokens wait for masks; ``logits [R, V]``, or of a prompt several rows of which
    the last is for all of them, stay as they are.
    """

    seats: tuple[Seat, ...]
    logits: Tensor
    choice: Choice
    drawing: Drawing | None
    readings: Readings
    ends: Ends
    reader: Callable[[], Chosen] | None = None

    def choose(self, masks: Mapping[Seat, np.ndarray]) -> Tensor:
        """Queue the choice; returns its tokens ``[R]``, on the device. Masks are sent as bits."""
        logits = self.logits[:, : self.choice.width]
        if len(logits) != len(self.seats):
            logits = logits[-1:].repeat(len(self.seats), 1)
        rows = [row for row, seat in enumerate(self.seats) if seat in masks]
        if rows:
            allowed = np.stack([masks[self.seats[row]] for row in rows])
            device, width = logits.device, self.choice.width
            bits = send(torch.from_numpy(np.packbits(allowed, 1, bitorder="little")), device)
            at = send(torch.tensor(rows), device)
            places = torch.arange(8, dtype=torch.uint8, device=device)
            is_allowed = ((bits.unsqueeze(-1) >> places) & 1).flatten(1)[:, :width].bool()
            chosen_from = logits.index_select(0, at).masked_fill(~is_allowed, float("-inf"))
            logits = logits.index_copy(0, at, chosen_from)
        self.choice.apply(logits, self.drawing)
        self.reader = self.readings.of(self.choice.tokens, self.choice.why, self.ends)
        return self.choice.tokens

    def read(self) -> Chosen:
        """Wait for the tokens that were chosen, and why they end or go on."""
        assert self.reader is not None, "the choice still waits for its masks"
        return self.reader()
