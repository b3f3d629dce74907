"""Draft verification by the CUDA executable. Excludes kernels and captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.draft_bucket import OWN_TOKEN, DraftBucket, DraftRows
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import needs_host
from tilewright.compiler.targets.cuda.outputs.sampled_tokens import SampledTokenReader
from tilewright.compiler.targets.cuda.outputs.sampling_batch import drawing_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    OpenSlot,
    SampledTokens,
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
    """

    slots: tuple[Slot, ...]
    read: Callable[[], SampledTokens]


class _Settled(NamedTuple):
    """What a slot's device memory lacks after its drafts were read.

    Attributes:
        token: Next input token.
        num_accepted: Accepted drafts that the per-sequence state lacks.
    """

    token: int
    num_accepted: int


class DraftSteps:
    """Runs decode steps with drafts.

    The host accepts drafts. A slot's position and next token are unknown until its rows are read. A
    step that uses the slot reads them first. Slots without drafts advance on the device and never
    wait. A pass leaves a slot's per-sequence state before its drafts. The next pass gets the
    slot's token from the host and applies the accepted drafts. Other work on the slot flushes both
    first.
    """

    def __init__(
        self,
        state: PagedState,
        device_slots: SlotTable,
        buckets: Buckets,
        answers: SampledTokenReader,
        slot_states: Mapping[Slot, SlotState],
        *,
        has_states: bool,
        leave: Callable[[], None],
    ) -> None:
        """``has_states``: Whether sequences have state in addition to pages."""
        self._state, self._device_slots, self._buckets = state, device_slots, buckets
        self._answers, self._slot_states, self._leave = answers, slot_states, leave
        self._in_flight: dict[Slot, _Verification] = {}
        self._has_states = has_states
        self._settled: dict[Slot, _Settled] = {}

    @property
    def is_in_flight(self) -> bool:
        """Whether slots wait for their accepted tokens."""
        return bool(self._in_flight)

    @property
    def is_busy(self) -> bool:
        """Whether a slot's device memory lacks tokens or accepted drafts."""
        return bool(self._in_flight or self._settled)

    def forget(self) -> None:
        """Forget all slots."""
        self._in_flight.clear()
        self._settled.clear()

    def settle(self, step: Step | None = None) -> None:
        """Read all drafts in flight if ``step`` uses a slot with drafts. None: always read.

        Flush the slots if ``step`` copies state. Flush slots with a forced token, a prompt, or a
        token of a step without drafts.
        """
        if not self.is_busy:
            return
        for edit in () if step is None else step.edits:
            if isinstance(edit, CloseSlot):
                self._in_flight.pop(edit.slot, None)
                self._settled.pop(edit.slot, None)
        moves = step is None or _moves_state(step)
        if self._in_flight and (
            moves or step is None or not self._in_flight.keys().isdisjoint(_slots_of(step))
        ):
            self._read()
        if moves or step is None:
            self._flush([*self._settled])
        else:
            plain = () if step.drafts else step.decode
            self._flush([*step.forced, *plain, *(chunk.slot for chunk in step.prompts)])

    def _read(self) -> None:
        for verification in {id(run): run for run in self._in_flight.values()}.values():
            chosen = verification.read()
            assert chosen.counts is not None
            ends = np.cumsum(chosen.counts).tolist()
            for slot, count, end in zip(verification.slots, chosen.counts, ends, strict=True):
                if self._in_flight.get(slot) is verification:
                    self._slot_states[slot].length += count
                    self._settled[slot] = _Settled(chosen.tokens[end - 1], count - 1)
        self._in_flight.clear()

    def _flush(self, slots: Sequence[Slot]) -> None:
        """Write the tokens of slots to the table. Apply their accepted drafts to their state."""
        if not self._settled:
            return
        settled = {slot: self._settled.pop(slot) for slot in slots if slot in self._settled}
        if settled:
            self._device_slots.put([*settled], [token for token, _ in settled.values()])
        replayed = [slot for slot in settled if settled[slot].num_accepted]
        size = self._buckets.rows[-1]
        for first in range(0, len(replayed) if self._has_states else 0, size):
            some = replayed[first : first + size]
            lengths = [self._slot_states[slot].length for slot in some]
            bucket = self._buckets.drafts(max(2, len(some)))
            bucket.replay(some, lengths, [settled[slot].num_accepted for slot in some])

    def next_tokens(self) -> dict[Slot, int]:
        """Return the next tokens of slots whose drafts were read, if the device lacks them."""
        return {slot: settled.token for slot, settled in self._settled.items()}

    def divide(self, step: Step, max_rows: int) -> tuple[tuple[Slot, ...], list[tuple[Slot, ...]]]:
        """Return the slots for plain decode passes, and slots by pass with drafts.

        Slots without drafts join a pass with drafts unless they wait for masks or host sampling.
        ``max_rows``: Maximum rows per pass.
        """
        if not step.drafts:
            self._flush(step.decode)
            return step.decode, []
        assert not step.want_logits, "no logits with drafts"
        late = {slot for slot in step.decode if needs_host(self._slot_states[slot].sampling)}
        plain = tuple(slot for slot in step.decode if slot not in step.drafts)
        has_device_drafts = not late.issuperset(step.drafts)
        if has_device_drafts and not (step.masked or late.intersection(plain)):
            plain = ()
        self._flush(plain)
        slots = [slot for slot in step.decode if slot not in late and slot not in plain]
        sampled_late = [slot for slot in step.decode if slot in late and slot in step.drafts]
        passes = self._cut(slots, step, max_rows) + self._cut(sampled_late, step, max_rows)
        return plain, passes

    def _cut(self, slots: Sequence[Slot], step: Step, max_rows: int) -> list[tuple[Slot, ...]]:
        """Return the slots by pass."""
        passes: list[tuple[Slot, ...]] = []
        current: list[Slot] = []
        num_rows = 0
        for slot in slots:
            count = len(step.drafts.get(slot, ()))
            assert count < max_rows, f"slot {slot}: {1 + count} rows, more than {max_rows}"
            if num_rows + 1 + count > max_rows:
                passes.append(tuple(current))
                current, num_rows = [], 0
            current.append(slot)
            num_rows += 1 + count
        return [*passes, tuple(current)] if current else []

    def run(self, slots: tuple[Slot, ...], step: Step) -> SamplerOutput:
        """Run a pass with drafts for ``slots``."""
        self._leave()
        drafts = tuple(step.drafts.get(slot, ()) for slot in slots)
        slot_states = [self._slot_states[slot] for slot in slots]
        lengths = np.array([state.length for state in slot_states])
        offsets = tuple(state.rotary_delta for state in slot_states)
        settled = [self._settled.pop(slot, _Settled(OWN_TOKEN, 0)) for slot in slots]
        tokens, accepted = zip(*settled, strict=True)
        rows = DraftRows(slots, drafts, lengths, tokens, accepted, offsets)
        self._state.check_all(slots, rows.lengths + rows.counts)
        bucket = self._buckets.drafts(len(rows.token_slots))
        bucket.run(rows, drawing_of(state.sampling for state in slot_states))
        if needs_host(slot_states[0].sampling):
            return self._sample_on_host(rows, bucket, step)
        output, read = self._answers.verified(rows, bucket.bucket, step)
        verification = _Verification(slots, read)
        for slot, draft, slot_state in zip(slots, drafts, slot_states, strict=True):
            if draft:
                self._in_flight[slot] = verification
            else:
                slot_state.length += 1
        return output

    def _sample_on_host(self, rows: DraftRows, bucket: DraftBucket, step: Step) -> SamplerOutput:
        """Sample a pass with biased logits. This waits for the device."""
        for slot in rows.slots:
            self._slot_states[slot].length += 1
        output, counts, tokens = self._answers.verified_on_host(rows, bucket.bucket, step)
        emitted = zip(rows.slots, rows.lengths.tolist(), counts, tokens, strict=True)
        for slot, length, count, token in emitted:
            self._slot_states[slot].length = length + count
            self._settled[slot] = _Settled(token, count - 1)
        return output


def _slots_of(step: Step) -> set[Slot]:
    """Return the slots in a step's work."""
    chunks = {slot for chunk in step.prompts for slot in (chunk.slot, *chunk.also)}
    return {*step.decode, *step.forced, *step.proposes, *chunks}


def _moves_state(step: Step) -> bool:
    """Return whether updates of a step copy slot state."""
    return any(not isinstance(edit, AssignPages | CloseSlot | OpenSlot) for edit in step.edits)
