"""Decode steps with drafts as CUDA graphs: several rows per slot. Excludes acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph, DecodeBucket
from tilewright.compiler.targets.cuda.outputs.sampling_batch import Drawing
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.state.token_batch import SKIPPED_TOKEN, DraftChain
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.interface.step import Slot

_NUM_WORDS = 9
_OWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a decode step with drafts, in slot order.

    Attributes:
        slots: The slots.
        drafts: Draft tokens by slot. Token 0 is the slot's own, token j is draft j.
            Empty: a single token.
        lengths: State length by slot, in positions, int64.
        states: Index of the per-sequence state after each draft, in order. Empty: no such
            state.
        offsets: Rotary position minus position by slot. Empty: zeros.
    """

    slots: tuple[Slot, ...]
    drafts: tuple[tuple[int, ...], ...]
    lengths: np.ndarray
    states: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def counts(self) -> np.ndarray:
        """Return the number of rows by slot."""
        return np.array([1 + len(draft) for draft in self.drafts], dtype=np.int64)

    @property
    def token_slots(self) -> tuple[Slot, ...]:
        """Return the slots by token."""
        pairs = zip(self.slots, self.drafts, strict=True)
        return tuple(slot for slot, draft in pairs for _ in range(1 + len(draft)))

    def words(self, size: int, padding: int) -> np.ndarray:
        """Return int64 ``[9, size]``: input token, position, slot, entry to read and
        entry to write in the slot table, index in the slot, state to read, state to write, and
        rotary offset.

        Args:
            padding: Table entry for padding.
        """
        counts = self.counts
        num_rows, first = int(counts.sum()), counts.cumsum() - counts
        words = np.zeros((_NUM_WORDS, size), dtype=np.int64)
        words[1], words[3:5] = -1, padding
        tokens, positions, slots, rows, stores, index, sources, targets, offsets = words[
            :, :num_rows
        ]
        tokens[:] = [token for draft in self.drafts for token in (_OWN_TOKEN, *draft)]
        positions[:] = np.repeat(self.lengths - first, counts) + np.arange(num_rows)
        slots[:] = rows[:] = np.repeat(self.slots, counts)
        stores[first[counts == 1]] = slots[first[counts == 1]]
        sources[:] = targets[:] = slots
        if self.offsets:
            offsets[:] = np.repeat(self.offsets, counts)
        if self.states:
            index[:] = np.arange(num_rows) - np.repeat(first, counts)
            targets[index > 0] = self.states
            sources[1:] = targets[:-1]
            sources[first] = slots[first]
        return words


class DraftBucket:
    """Decode steps with drafts in a `DecodeBucket`, by context length.

    A single copy uploads all rows. Tokens of slots without drafts stay on the device.
    """

    def __init__(
        self, bucket: DecodeBucket, steps: Steps, device_slots: SlotTable, *, has_states: bool
    ) -> None:
        """``has_states``: Whether sequences have state in addition to pages."""
        self.bucket, self._steps, self._device_slots = bucket, steps, device_slots
        shape = _NUM_WORDS, bucket.num_rows
        self._words = torch.zeros(shape, dtype=torch.int64, device=steps.device)
        self._passes: dict[tuple[int, int, bool], CapturedGraph] = {}
        self._has_states = has_states

    def prepare(self, max_drafts: int) -> None:
        """Capture all steps with up to ``max_drafts`` per slot. No slot may be in the rows."""
        limit = min(1 + max_drafts, self.bucket.num_rows)
        for reach in self._steps.attention.reaches:
            for num_waves in range(2, limit + 1) if self._has_states else (0,):
                self._capture(reach, num_waves, has_offsets=False)

    def run(self, rows: DraftRows, drawing: Drawing | None) -> None:
        """Run a step. Slots without drafts store their sampled token in the table."""
        counts = rows.counts
        num_pages = pages_of(int((rows.lengths + counts).max()))
        reach = next(size for size in self._steps.attention.reaches if size >= num_pages)
        num_waves = int(counts.max()) if self._has_states else 0
        captured = self._capture(reach, num_waves, has_offsets=any(rows.offsets))
        send_into(self._words, rows.words(self.bucket.num_rows, self._device_slots.padding))
        captured()
        if drawing is not None:
            self.bucket.draw(drawing)
        if 1 in counts:
            self._device_slots.give_back(self._words[4], self.bucket.choice.tokens)

    def _capture(self, reach: int, num_waves: int, *, has_offsets: bool) -> CapturedGraph:
        key = reach, num_waves, has_offsets
        if key not in self._passes:
            self._words.zero_()
            self._words[1], self._words[3:5] = -1, self._device_slots.padding
            self._passes[key] = self.bucket.captured(lambda: self._run(*key))
        return self._passes[key]

    def _chain(self, num_waves: int) -> DraftChain:
        _, positions, _, _, _, index, sources, targets, _ = self._words
        waves = torch.arange(num_waves, device=positions.device)
        skipped = torch.full_like(positions, SKIPPED_TOKEN)
        of_waves = torch.where(index == waves[:, None], positions, skipped)
        return DraftChain(of_waves, sources, targets)

    def _run(self, reach: int, num_waves: int, has_offsets: bool) -> None:
        rows, choice = self.bucket.rows, self.bucket.choice
        tokens, positions, slots, at, *_ = self._words
        own = self._device_slots.tokens.index_select(0, at)
        rows.tokens.copy_(torch.where(tokens == _OWN_TOKEN, own, tokens))
        rows.positions.copy_(positions)
        rows.slots.copy_(slots)
        choice.gather(self._device_slots, at)
        if num_waves:
            rows = replace(rows, chain=self._chain(num_waves))
        if has_offsets:
            rows = replace(rows, offsets=self._words[-1])
        self.bucket.logits = self._steps.decode(rows, reach=reach, has_drafts=True)
        choice.take_likeliest(self.bucket.logits, advancing=rows.positions)
