"""A device that runs queued steps when a step is read.

Output depends on the whole history in a slot's pages, on the seed and on the position. Therefore a
wrong token, position, page or slot changes the output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import Capabilities, Executable, MemoryUse
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    CopyState,
    DropSwapped,
    LoadState,
    OpenSlot,
    PrefillChunk,
    SampledTokens,
    SamplerOutput,
    SaveState,
    Slot,
    StateSnapshot,
    StateUpdate,
    Step,
    StepOutput,
    SwapHandle,
    SwapIn,
    SwapOut,
)
from tilewright.compiler.targets.interface.token_masks import TokenMask

VOCAB = 23


class Clock:
    """A clock that advances only by explicit delays."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Held:
    """State of an open slot. ``state``: the per-sequence state after ``state_at`` positions."""

    sampling: SamplingParams
    pages: list[int]
    length: int = 0
    token: int | None = None
    state: int = 0
    state_at: int = 0


@dataclass(slots=True)
class _Waiting:
    """A step with deferred sampling: its time and its tokens."""

    done: float
    masks: dict[Slot, np.ndarray] = field(default_factory=dict)


def _mixed(groups: list[tuple[Slot, ...]], read: Callable[[int], SampledTokens]) -> StepOutput:
    """Return all rows of a step in a single part."""

    def all_of_them() -> SampledTokens:
        found = [read(index) for index in range(len(groups))]
        counts = None
        if any(each.counts for each in found):
            counts = [one for each in found for one in each.counts or (1,) * len(each.tokens)]
        rows = [[one for each in found for one in getattr(each, n)] for n in _ROWS]
        return SampledTokens(rows[0], rows[1], counts=counts)

    slots = tuple(slot for group in groups for slot in group)
    return StepOutput((SamplerOutput(slots, all_of_them),), is_mixed=True)


_ROWS = ("tokens", "why")


class QueuedExecutable(Executable):
    """Logs ``("launch", n)`` and ``("read", n)`` for steps with sampled tokens.

    A step takes ``step_seconds`` on the device and ``host_seconds`` to launch. ``idle_seconds``:
    device time without a step. With ``page_size`` 0, a slot has one page for the whole context.
    """

    vocab_size = VOCAB

    def __init__(self, *, clock: Clock | None = None, **capabilities: Any) -> None:
        limits: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_context": 64,
            "runs_ahead": True,
            "cell": 4,
        }
        self.capabilities = Capabilities(**{**limits, **capabilities})
        self.contract = NumericContract((), ())
        self.log: list[tuple[str, int]] = []
        self.given: list[Step] = []
        self.clock = clock or Clock()
        self.step_seconds = self.host_seconds = 0.0
        self._device_free_at = self.idle_seconds = 0.0
        self._waiting: _Waiting | None = None
        self._queue: deque[tuple[_Waiting, Callable[[], None]]] = deque()
        self._unread: set[int] = set()
        self._num_chosen = 0
        self._slots: dict[Slot, _Held] = {}
        self._memory: dict[int, dict[int, int]] = {}
        self._snapshots: dict[StateSnapshot, tuple[int, int]] = {}
        self._places: dict[SwapHandle, tuple[_Held, list[int]]] = {}
        self._opened: set[Slot] = set()

    def step(self, step: Step) -> StepOutput:
        assert self._waiting is None, "the last step's choice is still waited for"
        self.given.append(step)
        self._check(step)
        self.clock.now += self.host_seconds
        groups: list[tuple[Slot, ...]] = [step.decode] if step.decode else []
        groups += [(chunk.slot, *chunk.also) for chunk in step.prompts if chunk.chooses]
        answers: list[list[list[tuple[int, int]]]] = [[] for _ in groups]
        if step.decode or step.prompts:
            self._wait_for_host()
            self._device_free_at += self.step_seconds
        choice = _Waiting(self._device_free_at)
        self._queue.append((choice, lambda: self._run(step, answers, choice.masks)))
        if step.masked:
            self._waiting = choice
        if not groups:
            return StepOutput()
        number, self._num_chosen = self._num_chosen, self._num_chosen + 1
        self._unread.add(number)
        assert len(self._unread) <= 2, "more than one step ahead"
        self.log.append(("launch", number))

        def read(index: int) -> SampledTokens:
            if number in self._unread:
                assert number == min(self._unread), "a step is read before the one before it"
                assert self._waiting is not choice, "a step is read before it is chosen from"
                self._work_off()
                self._unread.remove(number)
                self.log.append(("read", number))
                self.clock.now = max(self.clock.now, choice.done)
            tokens, why = zip(*(row for rows in answers[index] for row in rows), strict=True)
            counts = [len(rows) for rows in answers[index]] if step.drafts else None
            return SampledTokens(tokens, why, counts=counts)

        if step.decode and step.prompts and self.capabilities.passes:
            return _mixed(groups, read)
        parts = [SamplerOutput(slots, lambda i=i: read(i)) for i, slots in enumerate(groups)]
        return StepOutput(tuple(parts))

    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        assert self._waiting is not None, "no choice waits"
        self._wait_for_host()
        self._waiting.done = self._device_free_at
        for slot in allowed.slots:
            flags = allowed.flags(slot, VOCAB)
            assert flags is not None and flags.any()
            self._waiting.masks[slot] = flags
        self._waiting = None

    def _wait_for_host(self) -> None:
        """Start a step now, or after all queued steps."""
        late = max(0.0, self.clock.now - self._device_free_at)
        self.idle_seconds += late
        self._device_free_at += late

    def _check(self, step: Step) -> None:
        """Check the step's slots without its tokens: open and distinct."""
        limits = self.capabilities
        for edit in step.edits:
            if isinstance(edit, OpenSlot):
                is_kept = edit.keeps > 0 and not limits.page_size
                assert (edit.slot in self._opened) == is_kept
                assert 0 <= edit.slot < limits.max_num_seqs
                self._opened.add(edit.slot)
            elif isinstance(edit, CloseSlot):
                self._opened.remove(edit.slot)
        busy = [*step.decode, *(slot for c in step.prompts for slot in (c.slot, *c.also))]
        assert len(set(busy)) == len(busy), "a slot twice in a step"
        assert set(busy) <= self._opened
        assert len(step.prompts) <= limits.max_prompts
        assert not (step.masked and step.drafts) and not step.drafts.keys() & step.forced.keys()
        assert all(0 < len(each) <= limits.max_drafts for each in step.drafts.values())
        assert sum(len(chunk.tokens) for chunk in step.prompts) <= limits.max_step_tokens

    def _run(
        self, step: Step, answers: list[list[list[tuple[int, int]]]], masks: dict[Slot, np.ndarray]
    ) -> None:
        for edit in step.edits:
            self._apply(edit)
        self._check_pages(step)
        groups = iter(answers)
        if step.decode:
            found = next(groups)
            for slot in step.decode:
                held = self._slots[slot]
                token = step.forced.get(slot, held.token)
                assert token is not None, f"slot {slot} holds no token"
                self._write(held, token)
                found.append([self._choose(held, masks.get(slot))])
                self._verify(held, step.drafts.get(slot, ()), found[-1])
        for chunk in step.prompts:
            self._prompt(chunk)
            if chunk.chooses:
                found = next(groups)
                for slot in (chunk.slot, *chunk.also):
                    if slot != chunk.slot:
                        self._copy(chunk.slot, slot, chunk.end)
                    found.append([self._choose(self._slots[slot], masks.get(slot))])

    def _verify(self, held: _Held, drafts: tuple[int, ...], rows: list[tuple[int, int]]) -> None:
        """Verify drafts up to the first wrong draft, and discard the rest."""
        for at, draft in enumerate(drafts):
            if draft != rows[-1][0]:
                kept = replace(held)
                for each in drafts[at:] if not self.capabilities.has_sequence_state else ():
                    self._write(kept, each)
                break
            self._write(held, draft)
            rows.append(self._choose(held, None))

    def _prompt(self, chunk: PrefillChunk) -> None:
        held = self._slots[chunk.slot]
        assert chunk.start == held.length, "a gap"
        held.length = chunk.start
        marks = dict(chunk.saves)
        for token in chunk.tokens:
            self._write(held, token)
            if held.length in marks:
                self._apply(SaveState(chunk.slot, marks.pop(held.length)))
        assert not marks, "a snapshot outside the chunk"
        held.token = None

    def _apply(self, edit: StateUpdate) -> None:
        if isinstance(edit, OpenSlot):
            own = [] if self.capabilities.page_size else [edit.slot]
            fresh = _Held(edit.sampling, own, edit.keeps)
            if edit.keeps and own:
                held = self._slots[edit.slot]
                assert edit.keeps <= held.length
                fresh.state, fresh.state_at = held.state, held.state_at
            elif own:
                self._memory[edit.slot] = {}
            self._slots[edit.slot] = fresh
        elif isinstance(edit, CloseSlot):
            del self._slots[edit.slot]
        elif isinstance(edit, AssignPages):
            held = self._slots[edit.slot]
            assert edit.first <= len(held.pages)
            held.pages[edit.first :] = edit.ids
        elif isinstance(edit, SaveState):
            held = self._slots[edit.slot]
            assert held.state_at == held.length and edit.snapshot < self.capabilities.num_snapshots
            self._snapshots[edit.snapshot] = held.state, held.state_at
        elif isinstance(edit, LoadState):
            held = self._slots[edit.slot]
            held.state, held.state_at = self._snapshots[edit.snapshot]
            held.length = held.state_at
        elif isinstance(edit, CopyState):
            self._copy(edit.source, edit.target, edit.num_positions)
        else:
            self._move(edit)

    def _move(self, edit: SwapOut | SwapIn | DropSwapped) -> None:
        if isinstance(edit, SwapOut):
            held = self._slots[edit.slot]
            assert edit.place not in self._places
            self._places[edit.place] = replace(held), self._history(held)
        elif isinstance(edit, DropSwapped):
            del self._places[edit.place]
        else:
            kept, history = self._places.pop(edit.place)
            held = self._slots[edit.slot]
            for token in history:
                self._write(held, token)
            held.token = kept.token
            assert (held.length, held.state) == (kept.length, kept.state)

    def _copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        old, new = self._slots[source], self._slots[target]
        assert new.length == 0 and num_positions <= old.length
        size = self.capabilities.page_size
        if size:
            at = num_positions // size
            assert old.pages[:at] == new.pages[:at], "whole pages are shared"
            if num_positions % size:
                self._memory[new.pages[at]] = dict(self._memory[old.pages[at]])
        else:
            self._memory[target] = dict(self._memory[source])
        new.length, new.state, new.state_at = num_positions, old.state, old.state_at

    def _check_pages(self, step: Step) -> None:
        """Check that only the owner of a page writes to it."""
        size = self.capabilities.page_size
        if not size:
            return
        owners: dict[int, int] = {}
        for held in self._slots.values():
            for page in held.pages:
                owners[page] = owners.get(page, 0) + 1
        spans = [
            (slot, self._slots[slot].length, 1 + len(step.drafts.get(slot, ())), ())
            for slot in step.decode
        ]
        spans += [(c.slot, c.start, len(c.tokens), c.also) for c in step.prompts]
        for slot, start, count, also in spans:
            for at in range(start // size, (start + count - 1) // size + 1):
                page = self._slots[slot].pages[at]
                others = sum(page in self._slots[other].pages for other in also)
                assert owners[page] == 1 + others, f"slot {slot} writes a shared page"

    def _write(self, held: _Held, token: int) -> None:
        size = self.capabilities.page_size or self.capabilities.max_context
        page = held.pages[held.length // size]
        self._memory.setdefault(page, {})[held.length % size] = token
        if self.capabilities.has_sequence_state:
            assert held.state_at == held.length, "state of another position"
            held.state = zlib.crc32(bytes([token]), held.state)
            held.state_at += 1
        held.length += 1

    def _history(self, held: _Held) -> list[int]:
        size = self.capabilities.page_size or self.capabilities.max_context
        return [self._memory[held.pages[at // size]][at % size] for at in range(held.length)]

    def _choose(self, held: _Held, mask: np.ndarray | None) -> tuple[int, int]:
        history = self._history(held)
        if self.capabilities.has_sequence_state:
            assert held.state == zlib.crc32(bytes(history)), "state of another history"
        facts = (history, held.sampling.seed, held.length)
        among = range(VOCAB) if mask is None else np.flatnonzero(mask).tolist()
        held.token = among[zlib.crc32(repr(facts).encode()) % len(among)]
        return held.token, int(held.token in held.sampling.stop_token_ids)

    def _work_off(self) -> None:
        """Run all queued steps. A step with deferred sampling is the last."""
        while self._queue and self._queue[0][0] is not self._waiting:
            _, job = self._queue.popleft()
            job()

    def reset(self) -> None:
        self._waiting = None
        self._work_off()
        for kept in (self._slots, self._opened, self._snapshots, self._places):
            kept.clear()

    @property
    def num_places(self) -> int:
        """Number of swapped sequences."""
        self._work_off()
        return len(self._places)

    @property
    def num_open(self) -> int:
        """Number of open slots."""
        return len(self._opened)

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return num_positions
