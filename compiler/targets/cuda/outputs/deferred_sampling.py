"""Deferred sampling: samples on the device after the grammar masks arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.sampling.mask_logits import forbid
from tilewright.compiler.targets.cuda.outputs.pinned_ring import Ends, PinnedRing
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    SamplingBatch,
    drawing_of,
    make_choice,
)
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send
from tilewright.compiler.targets.interface.step import SampledTokens, Slot
from tilewright.compiler.targets.interface.token_masks import TokenMask


def needs_host(sampling: SamplingParams) -> bool:
    """Return whether a captured step cannot select these tokens."""
    return sampling.changes_logits


def choice_of(
    table: SlotTable,
    slots: Sequence[Slot],
    positions: Sequence[int],
    width: int,
    group: RankGroup | None = None,
) -> SamplingBatch:
    """Return a sampling batch for tokens at ``positions``, outside of CUDA graphs."""
    device = table.device
    choice = make_choice(len(slots), width, table.num_ends, device, group=group)
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
    """Select tokens from ``logits [R, V]``, with one entry for each slot. Return the sampling
    batch.
    """
    choice = choice_of(table, slots, positions, width, group)
    choice.apply(logits, drawing_of(sampling))
    return choice


@dataclass(slots=True)
class DeviceChoice:
    """R slots with tokens that wait for masks.

    Attributes:
        slots: Slots in order.
        logits: Logits ``[R, V]`` that ``choice`` reads. Masks exclude tokens here.
        choice: The sampling batch.
        again: Queues the selection and stores its tokens for the slots.
        ends: End tokens for checks on the host.
        reader: Waits for the tokens. None: the selection is not queued.
    """

    slots: tuple[Slot, ...]
    logits: Tensor
    choice: SamplingBatch
    again: Callable[[], None]
    ring: PinnedRing
    ends: Ends
    reader: Callable[[], SampledTokens] | None = None

    def choose(self, allowed: TokenMask) -> None:
        """Apply the masks and queue the selection."""
        self._forbid(allowed)
        self.again()
        self.reader = self.ring.send(self.choice, len(self.slots), self.ends)

    def _forbid(self, allowed: TokenMask) -> None:
        """Send the masks of these slots. Other rows remain unchanged."""
        places = {slot: row for row, slot in enumerate(self.slots)}
        masks = [mask for mask, slot in enumerate(allowed.slots) if slot in places]
        if not masks:
            return
        words = allowed.words if len(masks) == len(allowed.slots) else allowed.words[masks]
        rows = np.array([places[allowed.slots[mask]] for mask in masks], dtype=np.int64)
        device = self.logits.device
        sent = send(rows, device), send(words.view(np.int32), device)
        forbid(self.logits, *sent, width=self.choice.width)

    def read(self) -> SampledTokens:
        """Wait for the selected tokens and their finish reasons."""
        assert self.reader is not None, "the choice still waits for its masks"
        return self.reader()
