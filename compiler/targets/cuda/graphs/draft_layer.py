"""Drafts from a model's draft layer on the GPU. Excludes verification.

The layer's position t reads token t + 1 and the model's final hidden state at t. The slot's pages
store its keys and values at t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph
from tilewright.compiler.targets.cuda.state.final_states import RING, FinalStates, NormFunction
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.cuda.state.ragged import num_rows_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send, send_into
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.step import (
    CloseSlot,
    CopyState,
    OpenSlot,
    PrefillChunk,
    Slot,
    StateUpdate,
    SwapOut,
)

_READ, _DRAFT, _NEXT = range(3)
"""Steps: without logits or with logits, from kept states, and with the layer's own states."""
_OWN, _RING = -1, -2
"""Words for a next token on the device, and for a token in `FinalStates`."""
_MAX_UNREAD = RING - 16
"""Maximum unread tokens per slot."""
_WINDOWS = 2
"""Reads of a slot's tokens after its last draft. A probe while drafts are off is within them."""


class _LayerOutputs:
    """The layer's own final hidden states."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def keep(self, states: Tensor, batch: TokenBatch) -> None:
        self.states[: len(states)].copy_(states)

    def keep_prompts(
        self, states: Tensor, normed: NormFunction, batch: TokenBatch, decoding: slice
    ) -> None:
        """Do nothing: prompts have no drafts."""


class CudaDraftLayer:
    """Drafts tokens for the slots of a model.

    Wrong hidden states make wrong drafts, and the model verifies every draft. Hence an unknown
    hidden state is zero. Slots with common pages may overwrite a page's last position.
    """

    def __init__(
        self,
        steps: StepRunner,
        final_states: FinalStates,
        state: PagedState,
        device_slots: SlotTable,
        *,
        sizes: Sequence[int],
    ) -> None:
        """``sizes``: Captured batch sizes, ascending."""
        self._steps, self._final, self._state = steps, final_states, state
        self._device_slots = device_slots
        self._sizes, device = tuple(sizes), steps.device
        largest, width = self._sizes[-1], final_states.states.shape[-1]
        made = partial(torch.zeros, device=device)
        self._states, self._inputs = (
            made(largest, width, dtype=final_states.states.dtype) for _ in range(2)
        )
        self._tokens, self._next = (made(largest, dtype=torch.int64) for _ in range(2))
        self._words = {size: made(5, size, dtype=torch.int64) for size in self._sizes}
        self._captured: dict[tuple[int, int, int], CapturedGraph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._ends: dict[Slot, int] = {}
        self._drafting: dict[Slot, int] = {}  # reads that are left
        self._num_unread = 0
        self.num_choosable = 0
        outputs: Any = _LayerOutputs(self._states)
        steps.final_states = outputs

    def update(self, edit: StateUpdate, slot_states: Mapping[Slot, SlotState]) -> None:
        """Follow a state update, before it is applied."""
        if isinstance(edit, OpenSlot):
            self._open(edit.slot, edit.keeps)
        elif isinstance(edit, CloseSlot):
            self._read_slot(edit.slot, slot_states[edit.slot].length)
            self._ends.pop(edit.slot, None)
            self._drafting.pop(edit.slot, None)
        elif isinstance(edit, CopyState):
            self.copy(edit.source, edit.target, edit.num_positions)
        elif isinstance(edit, SwapOut):
            slot_state = slot_states[edit.slot]
            self._read_slot(edit.slot, slot_state.length)
            slot_state.hidden = self._final.states[edit.slot, self._last(slot_state)].clone()

    def resume(self, slot: Slot, slot_state: SlotState) -> None:
        """Continue a slot after its swap."""
        self._open(slot, slot_state.length)
        if slot_state.hidden is not None:
            self._final.states[slot, self._last(slot_state)].copy_(slot_state.hidden)
            slot_state.hidden = None

    @staticmethod
    def _last(slot_state: SlotState) -> int:
        """Return the entry of a slot's last position."""
        return max(0, slot_state.length - 1) % RING

    def _open(self, slot: Slot, length: int) -> None:
        """Begin a slot with ``length`` unknown hidden states."""
        self._final.clear(slot)
        self._ends[slot] = max(0, length - 1)

    def _read_slot(self, slot: Slot, length: int) -> None:
        """Run a slot's unread tokens: other slots may use its pages."""
        if length and slot in self._drafting:
            self._read(self._unread({slot: length - 1}))

    def copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Copy a slot's first positions to another slot."""
        self._final.copy(source, target)
        self._ends[target] = min(self._ends.get(source, 0), max(0, num_positions - 1))

    def forget(self) -> None:
        """Discard all slots."""
        self._ends.clear()
        self._drafting.clear()
        self._num_unread = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Discard a long prefill of a step that failed."""
        self._final.discard_prompts()

    @property
    def num_captures(self) -> int:
        """Return the number of captured graphs."""
        return len(self._captured)

    def prepare(self) -> None:
        """Capture all steps. Compile the prefill kernels."""
        for size in self._sizes:
            for reach in self._steps.attention.reaches:
                for work in (_READ, _DRAFT, _NEXT):
                    self._capture(size, reach, work)
        self._final.discard_prompts()  # of the model's own preparation
        if self._steps.device.type == "cuda":
            batch = TokenBatch.padding(RING, self._steps.device)
            batch = replace(batch, hidden=self._final.states[0])
            self._steps.prefill(batch, logit_rows=None, from_start=True)

    def read_prompts(
        self,
        chunks: Sequence[PrefillChunk],
        alignment: int,
        *,
        is_skipped: Callable[[PrefillChunk], bool],
    ) -> None:
        """Run the chunks of the model's last prefill. They begin at multiples of ``alignment``."""
        first, states = 0, self._final.take_prompts()
        for chunk in chunks:
            if not is_skipped(chunk):
                self._read_prompt(chunk, states[first : first + len(chunk.tokens) + 1])
            first += num_rows_of((chunk,), alignment)

    def _read_prompt(self, chunk: PrefillChunk, states: Tensor) -> None:
        """Run a chunk. ``states``: An entry without later reads, and the model's final states."""
        skipped, slot = int(chunk.start == 0), chunk.slot
        count, start = len(chunk.tokens) - skipped, max(0, chunk.start - 1)
        if slot in self._ends:
            self._read(self._unread({slot: start}))
        if count:
            tokens = np.array(
                [chunk.tokens[skipped:], range(start, start + count), [slot] * count],
                dtype=np.int64,
            )
            if not skipped:
                states[0].copy_(self._final.states[slot, start % RING])
            hidden = states[skipped:-1]
            read, positions, slots = send(tokens, self._steps.device)
            batch = TokenBatch(read, positions, slots, hidden=hidden)
            self._steps.prefill(batch, logit_rows=None, from_start=start == 0)
        self._final.states[slot, (chunk.end - 1) % RING].copy_(states[-1])
        self._ends[slot] = chunk.end - 1

    def count_tokens(self, num_tokens: int) -> bool:
        """Count a slot's tokens in a step. Return whether to call :meth:`read_all`."""
        self._num_unread = self._num_unread + num_tokens if self._drafting else 0
        return self._num_unread + num_tokens > _MAX_UNREAD

    def read_all(self, lengths: Mapping[Slot, int]) -> None:
        """Run unread tokens before ``lengths``, for slots with recent drafts.

        At their next draft, other slots have their last tokens only.
        """
        self._num_unread = 0
        ends = {slot: lengths[slot] - 1 for slot in self._drafting if lengths.get(slot)}
        self._drafting = {slot: left - 1 for slot, left in self._drafting.items() if left > 1}
        self._read(self._unread(ends))

    def propose(
        self, counts: Mapping[Slot, int], lengths: Mapping[Slot, int], tokens: Mapping[Slot, int]
    ) -> dict[Slot, list[int]]:
        """Return up to ``counts`` tokens after each slot's next token. Wait for them.

        A draft ends before logits with NaN, and at the last position in the slot's pages.

        Args:
            lengths: Positions by slot.
            tokens: Next tokens by slot. Default: from the device.
        """
        drafts: dict[Slot, list[int]] = {slot: [] for slot in counts}
        slots = [slot for slot in counts if lengths[slot]]
        self._drafting.update(dict.fromkeys(slots, _WINDOWS))
        for at in range(0, len(slots), self._sizes[-1]):
            batch = slots[at : at + self._sizes[-1]]
            limits = [
                min(counts[slot], self._state.capacity(slot) - lengths[slot] + 1) for slot in batch
            ]
            proposed = self._propose(batch, max(limits), [lengths[slot] for slot in batch], tokens)
            for slot, limit, draft in zip(batch, limits, proposed, strict=True):
                stop = draft.index(-1) if -1 in draft else len(draft)
                drafts[slot] = draft[: min(limit, stop)]
        return drafts

    def _propose(
        self,
        slots: Sequence[Slot],
        num_drafts: int,
        lengths: Sequence[int],
        tokens: Mapping[Slot, int],
    ) -> list[list[int]]:
        ends = {slot: length - 1 for slot, length in zip(slots, lengths, strict=True)}
        for slot, end in ends.items():
            self._ends.setdefault(slot, end)
        unread, own = self._unread(ends), {slot: tokens.get(slot, _OWN) for slot in slots}
        last = [(slot, ends[slot]) for slot in slots]
        if len(unread) + len(last) > self._sizes[-1]:
            self._read(unread)
            unread = []
        entries = sorted(unread + last)
        self._run_entries(entries, {(slot, end): own[slot] for slot, end in last}, _DRAFT)
        index_of = {entry: at for at, entry in enumerate(entries)}
        indices = np.array([index_of[entry] for entry in last], dtype=np.int64)
        index = send(indices, self._steps.device)
        torch.index_select(self._tokens, 0, index, out=self._next[: len(slots)])
        torch.index_select(self._states, 0, index, out=self._inputs[: len(slots)])
        drafts = [self._next[: len(slots)].clone()]
        for count in range(1, num_drafts):
            positions = [length - 1 + count for length in lengths]
            self._run_next(slots, positions)
            self._next[: len(slots)].copy_(self._tokens[: len(slots)])
            self._inputs[: len(slots)].copy_(self._states[: len(slots)])
            drafts.append(self._next[: len(slots)].clone())
        tokens_by_slot: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return tokens_by_slot

    def _unread(self, ends: Mapping[Slot, int]) -> list[tuple[Slot, int]]:
        """Return slots with unread positions before ``ends``. Mark them as read."""
        entries = []
        for slot, end in ends.items():
            first = max(self._ends[slot], end + 1 - RING)
            entries += [(slot, position) for position in range(first, end)]
            self._ends[slot] = end
        return entries

    def _read(self, entries: Sequence[tuple[Slot, int]]) -> None:
        for first in range(0, len(entries), self._sizes[-1]):
            self._run_entries(entries[first : first + self._sizes[-1]], {}, _READ)

    def _run_entries(
        self, entries: Sequence[tuple[Slot, int]], own: Mapping[tuple[Slot, int], int], work: int
    ) -> None:
        """Run ``(slot, position)``, in order by slot. ``own``: Their tokens, or ``_OWN``."""
        if not entries:
            return
        slots, positions = np.array(entries, dtype=np.int64).T
        size = self._size(len(entries))
        words = np.zeros((5, size), dtype=np.int64)
        words[0], words[3] = _RING, -1
        words[0, : len(entries)] = [own.get(entry, _RING) for entry in entries]
        words[1, : len(entries)] = slots * RING + (positions + 1) % RING
        words[2, : len(entries)] = slots * RING + positions % RING
        words[3, : len(entries)], words[4, : len(entries)] = positions, slots
        self._run(size, words, work)

    def _run_next(self, slots: Sequence[Slot], positions: Sequence[int]) -> None:
        """Run the previous draft tokens."""
        size = self._size(len(slots))
        words = np.zeros((5, size), dtype=np.int64)
        words[3] = -1
        capacity = [self._state.capacity(slot) for slot in slots]
        fits = [at if at < end else -1 for at, end in zip(positions, capacity, strict=True)]
        words[3, : len(slots)], words[4, : len(slots)] = fits, slots
        self._run(size, words, _NEXT)

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _run(self, size: int, words: np.ndarray, work: int) -> None:
        num_pages = pages_of(int(words[3].max()) + 1)
        reach = next(size for size in self._steps.attention.reaches if size >= num_pages)
        captured = self._capture(size, reach, work)
        send_into(self._words[size], words)
        captured()

    def _capture(self, size: int, reach: int, work: int) -> CapturedGraph:
        key = size, reach, work
        if key not in self._captured:
            self._words[size].zero_()
            self._words[size][3] = -1
            run = partial(self._run_layer, *key)
            self._captured[key] = CapturedGraph(run, self._steps.device, self._pool)
        return self._captured[key]

    def _run_layer(self, size: int, reach: int, work: int) -> None:
        own, token_at, state_at, positions, slots = self._words[size]
        if work != _NEXT:
            kept = self._final.tokens.view(-1).index_select(0, token_at)
            stored = self._device_slots.tokens.index_select(0, slots)
            tokens = torch.where(own == _RING, kept, torch.where(own == _OWN, stored, own))
            hidden = self._final.states.view(-1, self._states.shape[1]).index_select(0, state_at)
        else:
            tokens, hidden = self._next[:size].clamp(min=0), self._inputs[:size]
        batch = TokenBatch(tokens, positions, slots, hidden=hidden)
        how = {"has_drafts": True, "has_logits": work != _READ}
        logits = self._steps.decode(batch, reach=reach, **how)
        if work == _READ:
            return
        best, token = logits[:, : self.num_choosable or logits.shape[1]].max(-1)
        self._tokens[:size] = torch.where(best.isnan(), -1, token)
