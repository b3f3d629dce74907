"""Verification of drafts by the CUDA executable. Excludes kernels and captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.draft_bucket import DraftRows
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import needs_host
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import Answers
from tilewright.compiler.targets.cuda.outputs.sampling_batch import drawing_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.host.executable import SlotState
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    Chosen,
    CloseSlot,
    SamplerOutput,
    Slot,
    Step,
)


@dataclass(frozen=True, slots=True)
class _Verification:
    """A pass in flight: slots in order, and a reader for their emitted tokens."""

    slots: tuple[Slot, ...]
    read: Callable[[], Chosen]


class DraftSteps:
    """Runs decode steps with drafts.

    The host accepts drafts. A slot's position and next token are unknown until its rows are read. A
    step that uses the slot reads them first. Slots without drafts advance on the device and never
    wait.
    """

    def __init__(
        self,
        state: PagedState,
        table: SlotTable,
        buckets: Buckets,
        answers: Answers,
        slot_states: Mapping[Slot, SlotState],
        *,
        leave: Callable[[], None],
    ) -> None:
        self._state, self._table, self._buckets = state, table, buckets
        self._answers, self._slot_states, self._leave = answers, slot_states, leave
        self._in_flight: dict[Slot, _Verification] = {}

    @property
    def is_in_flight(self) -> bool:
        """Whether slots wait for their accepted tokens."""
        return bool(self._in_flight)

    def forget(self) -> None:
        """Forget all slots."""
        self._in_flight.clear()

    def settle(self, step: Step | None = None) -> None:
        """Read all drafts in flight if ``step`` uses a slot with drafts. None: always read."""
        if not self._in_flight:
            return
        if step is not None:
            for edit in step.edits:
                if isinstance(edit, CloseSlot):
                    self._in_flight.pop(edit.slot, None)
            if self._in_flight.keys().isdisjoint(_slots_of(step)) and not _moves_state(step):
                return
        tokens: dict[Slot, int] = {}
        for verification in {id(each): each for each in self._in_flight.values()}.values():
            chosen = verification.read()
            assert chosen.counts is not None
            ends = np.cumsum(chosen.counts).tolist()
            for slot, count, end in zip(verification.slots, chosen.counts, ends, strict=True):
                if self._in_flight.get(slot) is verification:
                    self._slot_states[slot].length += count
                    tokens[slot] = chosen.tokens[end - 1]
        self._in_flight.clear()
        if tokens:
            self._table.put([*tokens], [*tokens.values()])

    def divide(self, step: Step, max_rows: int) -> tuple[tuple[Slot, ...], list[tuple[Slot, ...]]]:
        """Return the slots for plain decode passes, and the slots for each pass with drafts.

        Slots without drafts join a pass with drafts unless they wait for masks or host sampling.
        ``max_rows``: Maximum rows per pass.
        """
        if not step.drafts:
            return step.decode, []
        assert not step.want_logits, "no logits with drafts"
        plain = tuple(slot for slot in step.decode if slot not in step.drafts)
        slots: Sequence[Slot] = step.decode
        if step.masked or any(needs_host(self._slot_states[slot].sampling) for slot in plain):
            slots = [slot for slot in step.decode if slot in step.drafts]
        else:
            plain = ()
        passes: list[tuple[Slot, ...]] = []
        current: list[Slot] = []
        num_rows = 0
        for slot in slots:
            count = 1 + len(step.drafts.get(slot, ()))
            assert count <= max_rows, f"slot {slot}: {count} rows of at most {max_rows}"
            if num_rows + count > max_rows:
                passes.append(tuple(current))
                current, num_rows = [], 0
            current.append(slot)
            num_rows += count
        return plain, [*passes, tuple(current)]

    def run(self, slots: tuple[Slot, ...], step: Step) -> SamplerOutput:
        """Run a pass with drafts for ``slots``."""
        self._leave()
        drafts = tuple(step.drafts.get(slot, ()) for slot in slots)
        slot_states = [self._slot_states[slot] for slot in slots]
        rows = DraftRows(slots, drafts, np.array([each.length for each in slot_states]))
        self._state.check_all(slots, rows.lengths + rows.counts)
        bucket = self._buckets.drafts(len(rows.row_slots))
        bucket.run(rows, drawing_of(each.sampling for each in slot_states))
        part, read = self._answers.verified(rows, bucket.bucket, step)
        verification = _Verification(slots, read)
        for slot, draft, slot_state in zip(slots, drafts, slot_states, strict=True):
            if draft:
                self._in_flight[slot] = verification
            else:
                slot_state.length += 1
        return part


def _slots_of(step: Step) -> set[Slot]:
    """Return the slots in the work of a step."""
    chunks = {slot for chunk in step.prompts for slot in (chunk.slot, *chunk.also)}
    return {*step.decode, *step.forced, *chunks}


def _moves_state(step: Step) -> bool:
    """Return whether updates of a step copy slot state."""
    return any(not isinstance(edit, AssignPages | CloseSlot) for edit in step.edits)
