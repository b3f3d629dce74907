"""Verification of drafts by the CUDA executable. Excludes kernels and captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.draft_bucket import DraftBucket, DraftRows
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
    """A pass in flight.

    Attributes:
        slots: Its slots in order.
        read: Reader for their emitted tokens.
        states: Per-sequence states after the drafts, by slot.
    """

    slots: tuple[Slot, ...]
    read: Callable[[], Chosen]
    states: Mapping[Slot, tuple[int, ...]]


class DraftSteps:
    """Runs decode steps with drafts.

    The host accepts drafts. A slot's position and next token are unknown until its rows are read. A
    step that uses the slot reads them first. Slots without drafts advance on the device and never
    wait.
    """

    def __init__(
        self,
        state: PagedState,
        device_slots: SlotTable,
        buckets: Buckets,
        answers: Answers,
        slot_states: Mapping[Slot, SlotState],
        *,
        leave: Callable[[], None],
    ) -> None:
        self._state, self._device_slots, self._buckets = state, device_slots, buckets
        self._answers, self._slot_states, self._leave = answers, slot_states, leave
        self._in_flight: dict[Slot, _Verification] = {}
        self._free_states = self._all_states()

    @property
    def is_in_flight(self) -> bool:
        """Whether slots wait for their accepted tokens."""
        return bool(self._in_flight)

    def forget(self) -> None:
        """Forget all slots."""
        self._in_flight.clear()
        self._free_states = self._all_states()

    def _all_states(self) -> list[int]:
        first = self._state.first_draft_state
        return [*range(first, first + self._state.num_draft_states)]

    def settle(self, step: Step | None = None) -> None:
        """Read all drafts in flight if ``step`` uses a slot with drafts. None: always read."""
        if not self._in_flight:
            return
        if step is not None:
            for edit in step.edits:
                if isinstance(edit, CloseSlot) and edit.slot in self._in_flight:
                    self._free_states += self._in_flight.pop(edit.slot).states[edit.slot]
            if self._in_flight.keys().isdisjoint(_slots_of(step)) and not _moves_state(step):
                return
        tokens: dict[Slot, int] = {}
        for verification in {id(run): run for run in self._in_flight.values()}.values():
            chosen = verification.read()
            assert chosen.counts is not None
            ends = np.cumsum(chosen.counts).tolist()
            for slot, count, end in zip(verification.slots, chosen.counts, ends, strict=True):
                if self._in_flight.get(slot) is verification:
                    self._slot_states[slot].length += count
                    tokens[slot] = chosen.tokens[end - 1]
                    self._release(slot, verification.states[slot], count)
        self._in_flight.clear()
        if tokens:
            self._device_slots.put([*tokens], [*tokens.values()])

    def divide(self, step: Step, max_rows: int) -> tuple[tuple[Slot, ...], list[tuple[Slot, ...]]]:
        """Return the slots for plain decode passes, and slots by pass with drafts.

        Slots without drafts join a pass with drafts unless they wait for masks or host sampling.
        ``max_rows``: Maximum rows per pass.
        """
        if not step.drafts:
            return step.decode, []
        assert not step.want_logits, "no logits with drafts"
        late = {slot for slot in step.decode if needs_host(self._slot_states[slot].sampling)}
        plain = tuple(slot for slot in step.decode if slot not in step.drafts)
        has_device_drafts = not late.issuperset(step.drafts)
        if has_device_drafts and not (step.masked or late.intersection(plain)):
            plain = ()
        slots = [slot for slot in step.decode if slot not in late and slot not in plain]
        sampled_late = [slot for slot in step.decode if slot in late and slot in step.drafts]
        passes = self._cut(slots, step, max_rows) + self._cut(sampled_late, step, max_rows)
        return plain, passes

    def _cut(self, slots: Sequence[Slot], step: Step, max_rows: int) -> list[tuple[Slot, ...]]:
        """Return the slots by pass."""
        max_drafts = self._state.num_draft_states or max_rows
        passes: list[tuple[Slot, ...]] = []
        current: list[Slot] = []
        num_rows = num_drafts = 0
        for slot in slots:
            count = len(step.drafts.get(slot, ()))
            assert count < max_rows, f"slot {slot}: {1 + count} rows, more than {max_rows}"
            if num_rows + 1 + count > max_rows or num_drafts + count > max_drafts:
                passes.append(tuple(current))
                current, num_rows, num_drafts = [], 0, 0
            current.append(slot)
            num_rows, num_drafts = num_rows + 1 + count, num_drafts + count
        return [*passes, tuple(current)] if current else []

    def run(self, slots: tuple[Slot, ...], step: Step) -> SamplerOutput:
        """Run a pass with drafts for ``slots``."""
        self._leave()
        drafts = tuple(step.drafts.get(slot, ()) for slot in slots)
        slot_states = [self._slot_states[slot] for slot in slots]
        states = self._take_states(slots, drafts)
        lengths = np.array([state.length for state in slot_states])
        offsets = tuple(state.rotary_delta for state in slot_states)
        rows = DraftRows(
            slots, drafts, lengths, tuple(chain.from_iterable(states.values())), offsets
        )
        self._state.check_all(slots, rows.lengths + rows.counts)
        bucket = self._buckets.drafts(len(rows.token_slots))
        bucket.run(rows, drawing_of(state.sampling for state in slot_states))
        if needs_host(slot_states[0].sampling):
            return self._sample_on_host(rows, states, bucket, step)
        output, read = self._answers.verified(rows, bucket.bucket, step)
        verification = _Verification(slots, read, states)
        for slot, draft, slot_state in zip(slots, drafts, slot_states, strict=True):
            if draft:
                self._in_flight[slot] = verification
            else:
                slot_state.length += 1
        return output

    def _sample_on_host(
        self,
        rows: DraftRows,
        states: Mapping[Slot, tuple[int, ...]],
        bucket: DraftBucket,
        step: Step,
    ) -> SamplerOutput:
        """Sample a pass with biased logits. This waits for the device."""
        for slot in rows.slots:
            self._slot_states[slot].length += 1
        output, counts, tokens = self._answers.verified_on_host(rows, bucket.bucket, step)
        for slot, length, count in zip(rows.slots, rows.lengths.tolist(), counts, strict=True):
            self._slot_states[slot].length = length + count
            self._release(slot, states[slot], count)
        self._device_slots.put(rows.slots, tokens)
        return output

    def _release(self, slot: Slot, states: tuple[int, ...], num_emitted: int) -> None:
        """Free the states after drafts. The slot gets the state after its last accepted draft."""
        if states and num_emitted > 1:
            self._state.accept(states[num_emitted - 2], slot)
        self._free_states += states

    def _take_states(
        self, slots: Sequence[Slot], drafts: Sequence[tuple[int, ...]]
    ) -> dict[Slot, tuple[int, ...]]:
        """Return free states for drafts by slot. Without per-sequence state: none."""
        if not self._state.num_draft_states:
            return dict.fromkeys(slots, ())
        if len(self._free_states) < sum(map(len, drafts)):
            self.settle()
        states: dict[Slot, tuple[int, ...]] = {}
        for slot, draft in zip(slots, drafts, strict=True):
            states[slot] = tuple(self._free_states.pop() for _ in draft)
        return states


def _slots_of(step: Step) -> set[Slot]:
    """Return the slots in the work of a step."""
    chunks = {slot for chunk in step.prompts for slot in (chunk.slot, *chunk.also)}
    return {*step.decode, *step.forced, *chunks}


def _moves_state(step: Step) -> bool:
    """Return whether updates of a step copy slot state."""
    return any(not isinstance(edit, AssignPages | CloseSlot) for edit in step.edits)
