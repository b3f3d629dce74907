"""Rows of a masked step, chosen on the device once it has the masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.sampling.mask_logits import forbid
from tilewright.compiler.targets.cuda.outputs.pinned_ring import Ends, Readings
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    SamplingBatch,
    drawing_of,
    make_choice,
)
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send
from tilewright.compiler.targets.interface.step import Chosen, Slot
from tilewright.compiler.targets.interface.token_masks import Allowed


def needs_host(sampling: SamplingParams) -> bool:
    """Whether a captured step cannot choose these tokens."""
    return sampling.changes_logits


def choice_of(
    table: SlotTable,
    slots: Sequence[Slot],
    positions: Sequence[int],
    width: int,
    group: RankGroup | None = None,
) -> SamplingBatch:
    """How tokens that will stand at ``positions`` are chosen for slots, outside of a graph."""
    device = table.device
    tokens = torch.zeros(len(slots), dtype=torch.int64, device=device)
    choice = make_choice(len(slots), width, table.num_ends, tokens, group=group)
    choice.gather(table, table.index(slots))
    choice.positions.copy_(send(torch.tensor(positions), device))
    return choice


def choose_now(
    table: SlotTable,
    slots: Sequence[Slot],
    positions: Sequence[int],
    width: int,
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    group: RankGroup | None = None,
) -> SamplingBatch:
    """:func:`choice_of`, of ``logits [R, V]``, which are for these slots."""
    choice = choice_of(table, slots, positions, width, group)
    choice.apply(logits, drawing_of(sampling))
    return choice


@dataclass(slots=True)
class DeviceChoice:
    """R slots whose tokens wait for masks. ``logits [R, V]``: what ``choice`` reads, of which masks
    take tokens out; ``again`` queues it, and lets the slots hold what it chose.
    """

    slots: tuple[Slot, ...]
    logits: Tensor
    choice: SamplingBatch
    again: Callable[[], None]
    readings: Readings
    ends: Ends
    reader: Callable[[], Chosen] | None = None

    def choose(self, allowed: Allowed) -> None:
        """Queue the choice."""
        self._forbid(allowed)
        self.again()
        count = len(self.slots)
        tokens, why = self.choice.tokens[:count], self.choice.why[:count]
        self.reader = self.readings.of(tokens, why, self.ends)

    def _forbid(self, allowed: Allowed) -> None:
        """Send the bits of those slots that have a mask here; the other rows are not touched."""
        places = {slot: row for row, slot in enumerate(self.slots)}
        masks = [mask for mask, slot in enumerate(allowed.slots) if slot in places]
        if not masks:
            return
        words = allowed.words if len(masks) == len(allowed.slots) else allowed.words[masks]
        rows = np.array([places[allowed.slots[mask]] for mask in masks], dtype=np.int64)
        device = self.logits.device
        sent = send(rows, device), send(words.view(np.int32), device)
        forbid(self.logits, *sent, width=self.choice.width)

    def read(self) -> Chosen:
        """Wait for the tokens that were chosen, and why they end or go on."""
        assert self.reader is not None, "the choice still waits for its masks"
        return self.reader()
