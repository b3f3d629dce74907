"""Batches of several prompt chunks, also with decode rows. Uses graphs if possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import choose_now
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import SampledTokenReader
from tilewright.compiler.targets.cuda.outputs.sampling_batch import drawing_of
from tilewright.compiler.targets.cuda.state.ragged import join, num_rows_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.step import PrefillChunk, SamplerOutput, Slot, Step


class MixedBatchRunner:
    """Runs several prompt chunks as a batch.

    Args:
        check: returns the state of a chunk's slot.
        leave: copies slot data from a decode graph back to the executable.
    """

    def __init__(
        self,
        steps: StepRunner,
        state: PagedState,
        table: SlotTable,
        buckets: Buckets,
        answers: SampledTokenReader,
        slot_states: Mapping[Slot, SlotState],
        *,
        check: Callable[[PrefillChunk], SlotState],
        leave: Callable[[], None],
    ) -> None:
        self._steps, self._state, self._device_slots = steps, state, table
        self._buckets, self._answers, self._slot_states = buckets, answers, slot_states
        self._check, self._leave = check, leave
        self.after: Callable[[Sequence[PrefillChunk]], None] = lambda chunks: None
        """Called with the chunks of a forward."""

    def run(
        self, chunks: Sequence[PrefillChunk], step: Step, decoding: tuple[Slot, ...] = ()
    ) -> list[SamplerOutput]:
        """Run prompt chunks and a token per decoding slot as a batch. Return sampled tokens."""
        for chunk in chunks:
            slot_state = self._check(chunk)
            slot_state.length, slot_state.token = chunk.end, None
        positions = self._go_on(decoding)
        ends = {slot: at + 1 for slot, at in positions.items()}
        ends |= {chunk.slot: chunk.end for chunk in chunks if chunk.chooses}
        may_be_captured = self._answers.may_be_captured(tuple(ends), step)
        found = None
        if may_be_captured:
            found = self._buckets.batch(num_rows_of(chunks, self._buckets.alignment), len(ends))
        if found is None:
            return self._uncaptured(chunks, step, positions, ends)
        bucket, size = found
        drawing = drawing_of([self._slot_states[slot].sampling for slot in ends])
        now = None if step.masked else drawing
        bucket.run(size, chunks, positions, ends, now, self._state.marks(chunks))
        self._state.keep(chunks)
        self.after(chunks)
        slots = tuple(ends)
        if not slots:
            return []
        if step.masked:
            return [self._answers.masked(slots, bucket, step, drawing)]
        return [self._answers.chosen(slots, bucket.logits[: len(slots)], bucket.choice, step)]

    def _uncaptured(
        self,
        chunks: Sequence[PrefillChunk],
        step: Step,
        positions: dict[Slot, int],
        ends: dict[Slot, int],
    ) -> list[SamplerOutput]:
        """Run a batch without a graph: larger than all graphs, or with deferred sampling."""
        decoding = tuple(positions)
        ragged = join(
            chunks,
            self._device_slots.device,
            alignment=self._buckets.alignment,
            slots=decoding,
            positions=tuple(positions.values()),
            marks=self._state.marks(chunks),
        )
        if decoding:
            ragged.take_tokens(self._device_slots.tokens)
        logits = self._steps.prefill(
            ragged.rows,
            logit_rows=ragged.last if ends else None,
            layout=ragged.layout,
        )
        self._state.keep(chunks)
        self.after(chunks)
        if logits is None:
            return []
        slots = tuple(ends)
        chosen = [self._slot_states[slot].sampling for slot in slots]
        if self._answers.is_late(slots, step):
            return [self._answers.late(slots, logits, step)]
        at, width = [*ends.values()], self._answers.num_choosable
        choice = choose_now(self._device_slots, slots, at, width, logits, chosen, self._steps.group)
        self._device_slots.give_back(self._device_slots.index(slots), choice.tokens)
        return [self._answers.chosen(slots, logits, choice, step)]

    def _go_on(self, slots: tuple[Slot, ...]) -> dict[Slot, int]:
        """Advance decoding slots by a position, outside a graph. Return their positions."""
        if not slots:
            return {}
        self._leave()
        positions = [self._slot_states[slot].length for slot in slots]
        self._state.check_all(slots, np.array(positions) + 1)
        for slot, at in zip(slots, positions, strict=True):
            self._slot_states[slot].length = at + 1
        return dict(zip(slots, positions, strict=True))
