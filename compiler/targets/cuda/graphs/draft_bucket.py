"""Decode steps with drafts as CUDA graphs: several rows per slot. Excludes acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph, DecodeBucket
from tilewright.compiler.targets.cuda.outputs.sampling_batch import Drawing
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.interface.step import Slot

_NUM_WORDS = 5
_OWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a decode step with drafts, in slot order.

    Attributes:
        slots: The slots.
        drafts: Draft tokens by slot. Row 0 reads the slot's token, row j reads draft j. Empty: a
            single row.
        lengths: State length by slot, in positions, int64.
    """

    slots: tuple[Slot, ...]
    drafts: tuple[tuple[int, ...], ...]
    lengths: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Return the number of rows by slot."""
        return np.array([1 + len(draft) for draft in self.drafts], dtype=np.int64)

    @property
    def row_slots(self) -> tuple[Slot, ...]:
        """Return the slot of each row."""
        pairs = zip(self.slots, self.drafts, strict=True)
        return tuple(slot for slot, draft in pairs for _ in range(1 + len(draft)))

    def words(self, size: int, padding: int) -> np.ndarray:
        """Return int64 ``[5, size]``: input token, position, slot, table row to read, and table row
        to write.

        Args:
            padding: Table row for padding.
        """
        counts = self.counts
        num_rows, first = int(counts.sum()), counts.cumsum() - counts
        words = np.zeros((_NUM_WORDS, size), dtype=np.int64)
        words[1], words[3:] = -1, padding
        tokens, positions, slots, rows, stores = words[:, :num_rows]
        tokens[:] = [token for draft in self.drafts for token in (_OWN_TOKEN, *draft)]
        positions[:] = np.repeat(self.lengths - first, counts) + np.arange(num_rows)
        slots[:] = rows[:] = np.repeat(self.slots, counts)
        stores[first[counts == 1]] = slots[first[counts == 1]]
        return words


class DraftBucket:
    """Decode steps with drafts in a `DecodeBucket`, by context length.

    A single copy uploads all rows. The device keeps the tokens of slots without drafts.
    """

    def __init__(self, bucket: DecodeBucket, steps: Steps, table: SlotTable) -> None:
        self.bucket, self._steps, self._table = bucket, steps, table
        shape = _NUM_WORDS, bucket.num_rows
        self._words = torch.zeros(shape, dtype=torch.int64, device=steps.device)
        self._passes: dict[int, CapturedGraph] = {}

    def prepare(self) -> None:
        """Capture the steps for every context length. No slot may be in the rows."""
        for reach in self._steps.attention.reaches:
            self._capture(reach)

    def run(self, rows: DraftRows, drawing: Drawing | None) -> None:
        """Run a step. Slots without drafts store their sampled token in the table."""
        counts = rows.counts
        num_pages = pages_of(int((rows.lengths + counts).max()))
        reach = next(each for each in self._steps.attention.reaches if each >= num_pages)
        captured = self._capture(reach)
        send_into(self._words, rows.words(self.bucket.num_rows, self._table.padding))
        captured()
        if drawing is not None:
            self.bucket.draw(drawing)
        if 1 in counts:
            self._table.give_back(self._words[4], self.bucket.choice.tokens)

    def _capture(self, reach: int) -> CapturedGraph:
        if reach not in self._passes:
            self._words[1], self._words[3:] = -1, self._table.padding
            self._passes[reach] = self.bucket.captured(lambda: self._run(reach))
        return self._passes[reach]

    def _run(self, reach: int) -> None:
        rows, choice = self.bucket.rows, self.bucket.choice
        tokens, positions, slots, at, _ = self._words
        held = self._table.tokens.index_select(0, at)
        rows.tokens.copy_(torch.where(tokens == _OWN_TOKEN, held, tokens))
        rows.positions.copy_(positions)
        rows.slots.copy_(slots)
        choice.gather(self._table, at)
        self.bucket.logits = self._steps.decode(rows, reach=reach, has_drafts=True)
        choice.take_likeliest(self.bucket.logits, advancing=rows.positions)
