"""Decode steps with drafts as CUDA graphs: several rows per slot. Excludes acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph, DecodeBucket
from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingFilters
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.state.token_batch import SlotRows, TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.interface.step import Slot

_NUM_WORDS = 8
OWN_TOKEN = -1
"""Word for a token that only the device has."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a decode step with drafts, in slot order.

    Attributes:
        slots: The slots.
        drafts: Draft tokens by slot. Token 0 is the slot's own, token j is draft j.
            Empty: a single token.
        lengths: State length by slot, in positions, int64.
        tokens: Token 0 by slot, or `OWN_TOKEN`.
        accepted: Accepted drafts of the previous step that the per-sequence state lacks, by slot.
        offsets: Rotary position minus position by slot. Empty: zeros.
    """

    slots: tuple[Slot, ...]
    drafts: tuple[tuple[int, ...], ...]
    lengths: np.ndarray
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
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
        """Return int64 ``[8, size]``: input token, position, slot, entry to read and entry to write
        in the slot table, the fields of `SlotRows`, and rotary offset.

        Args:
            padding: Table entry for padding.
        """
        counts = self.counts
        num_rows, first = int(counts.sum()), counts.cumsum() - counts
        words = np.zeros((_NUM_WORDS, size), dtype=np.int64)
        words[1], words[3:5] = -1, padding
        words[5, num_rows:] = 1
        tokens, positions, slots, rows, stores, of_slot, accepted, offsets = words[:, :num_rows]
        tokens[:] = [
            token
            for own, draft in zip(self.tokens, self.drafts, strict=True)
            for token in (own, *draft)
        ]
        positions[:] = np.repeat(self.lengths - first, counts) + np.arange(num_rows)
        slots[:] = rows[:] = np.repeat(self.slots, counts)
        stores[first[counts == 1]] = slots[first[counts == 1]]
        of_slot[first], accepted[first] = counts, self.accepted
        if self.offsets:
            offsets[:] = np.repeat(self.offsets, counts)
        return words


class DraftBucket:
    """Decode steps with drafts in a `DecodeBucket`, by context length.

    A single copy uploads all rows. Slot tokens without drafts stay on the device.
    """

    def __init__(
        self, bucket: DecodeBucket, steps: StepRunner, device_slots: SlotTable, *, has_states: bool
    ) -> None:
        """``has_states``: Whether sequences have state in addition to pages."""
        self.bucket, self._steps, self._device_slots = bucket, steps, device_slots
        shape = _NUM_WORDS, bucket.num_rows
        self._words = torch.zeros(shape, dtype=torch.int64, device=steps.device)
        self._passes: dict[tuple[int, bool], CapturedGraph] = {}
        self._replay: CapturedGraph | None = None
        self._has_states = has_states

    def prepare(self) -> None:
        """Capture all steps. No slot may be in the rows."""
        for reach in self._steps.attention.reaches:
            self._capture(reach, has_offsets=False)
        if self._has_states:
            self._capture_replay()

    def run(self, rows: DraftRows, drawing: SamplingFilters | None) -> None:
        """Run a step. Slots without drafts store their sampled token in the table."""
        counts = rows.counts
        num_pages = pages_of(int((rows.lengths + counts).max()))
        reach = next(size for size in self._steps.attention.reaches if size >= num_pages)
        captured = self._capture(reach, has_offsets=any(rows.offsets))
        send_into(self._words, rows.words(self.bucket.num_rows, self._device_slots.padding))
        captured()
        if drawing is not None:
            self.bucket.draw(drawing)
        if 1 in counts:
            self._device_slots.give_back(self._words[4], self.bucket.choice.tokens)

    def replay(
        self, slots: Sequence[Slot], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Apply accepted drafts to the per-sequence state of slots.

        ``lengths``: Positions by slot, accepted drafts included.
        """
        captured, count = self._capture_replay(), len(slots)
        words = np.zeros((_NUM_WORDS, self.bucket.num_rows), dtype=np.int64)
        words[1] = -1
        words[1, :count], words[2, :count], words[6, :count] = lengths, slots, accepted
        send_into(self._words, words)
        captured()

    def _capture_replay(self) -> CapturedGraph:
        if self._replay is None:
            self._clear()
            tokens, positions, slots, *_ = self._words
            rows = TokenBatch(tokens, positions, slots, by_slot=self._by_slot())
            self._replay = self.bucket.captured(lambda: self._steps.replay(rows))
        return self._replay

    def _capture(self, reach: int, *, has_offsets: bool) -> CapturedGraph:
        key = reach, has_offsets
        if key not in self._passes:
            self._clear()
            self._passes[key] = self.bucket.captured(lambda: self._run(*key))
        return self._passes[key]

    def _clear(self) -> None:
        self._words.zero_()
        self._words[1], self._words[3:5] = -1, self._device_slots.padding

    def _by_slot(self) -> SlotRows | None:
        return SlotRows(self._words[5], self._words[6]) if self._has_states else None

    def _run(self, reach: int, has_offsets: bool) -> None:
        rows, choice = self.bucket.rows, self.bucket.choice
        tokens, positions, slots, at, *_ = self._words
        own = self._device_slots.tokens.index_select(0, at)
        rows.tokens.copy_(torch.where(tokens == OWN_TOKEN, own, tokens))
        rows.positions.copy_(positions)
        rows.slots.copy_(slots)
        choice.gather(self._device_slots, at)
        rows = replace(rows, by_slot=self._by_slot())
        if has_offsets:
            rows = replace(rows, offsets=self._words[-1])
        self.bucket.logits = self._steps.decode(rows, reach=reach, has_drafts=True)
        choice.take_likeliest(self.bucket.logits, advancing=rows.positions)
