"""A device that works when it is waited for: steps are queued, and run in order when one is read.

What it answers depends on a seat's whole history, read through its pages, and on seed and position:
so a token, a position, a page or a seat that is not the right one changes the answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright.compiler.targets.base import Capabilities, Executable, MemoryUse
from tilewright.compiler.targets.contract import NumericContract
from tilewright.compiler.targets.step import (
    Choosing,
    Chosen,
    Chunk,
    Close,
    Edit,
    Open,
    Pages,
    Part,
    Seat,
    Step,
    StepOutput,
)

VOCAB = 23


class Clock:
    """Seconds that pass only where they are spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Held:
    """What the device knows of an open seat."""

    choosing: Choosing
    pages: list[int]
    length: int = 0
    token: int | None = None


class QueuedExecutable(Executable):
    """``log`` holds ``("launch", n)`` and ``("read", n)`` of steps that choose tokens, n from 0.

    A step takes ``step_seconds`` of the clock on the device, one after another, and giving it to
    the device ``host_seconds``. With ``page_size`` 0 each seat has one page as long as the context.
    """

    vocab_size = VOCAB

    def __init__(self, *, clock: Clock | None = None, **capabilities: Any) -> None:
        limits: dict[str, Any] = {"max_seats": 4, "max_context": 64, "runs_ahead": True, "cell": 4}
        self.capabilities = Capabilities(**{**limits, **capabilities})
        self.contract = NumericContract((), ())
        self.log: list[tuple[str, int]] = []
        self.given: list[Step] = []
        self.clock = clock or Clock()
        self.step_seconds = self.host_seconds = 0.0
        self._device_free_at = 0.0
        self._queue: list[Callable[[], None]] = []
        self._unread: set[int] = set()
        self._num_chosen = 0
        self._seats: dict[Seat, _Held] = {}
        self._memory: dict[int, dict[int, int]] = {}
        self._opened: set[Seat] = set()

    def step(self, step: Step) -> StepOutput:
        self.given.append(step)
        self._check(step)
        self.clock.now += self.host_seconds
        groups: list[tuple[Seat, ...]] = [step.decode] if step.decode else []
        groups += [(chunk.seat,) for chunk in step.prompts if chunk.chooses]
        answers: list[list[tuple[int, int]]] = [[] for _ in groups]
        if step.decode or step.prompts:
            start = max(self._device_free_at, self.clock.now)
            self._device_free_at = start + self.step_seconds
        done = self._device_free_at
        self._queue.append(lambda: self._run(step, answers))
        if not groups:
            return StepOutput()
        number, self._num_chosen = self._num_chosen, self._num_chosen + 1
        self._unread.add(number)
        assert len(self._unread) <= 2, "more than one step ahead"
        self.log.append(("launch", number))

        def read(index: int) -> Chosen:
            if number in self._unread:
                assert number == min(self._unread), "a step is read before the one before it"
                self._work_off()
                self._unread.remove(number)
                self.log.append(("read", number))
                self.clock.now = max(self.clock.now, done)
            tokens, why = zip(*answers[index], strict=True)
            return Chosen(tokens, why)

        parts = [Part(seats, lambda i=i: read(i)) for i, seats in enumerate(groups)]
        return StepOutput(tuple(parts))

    def _check(self, step: Step) -> None:
        """What can be told without the tokens: who is open, and nobody twice."""
        limits = self.capabilities
        for edit in step.edits:
            if isinstance(edit, Open):
                assert (edit.seat in self._opened) == (edit.keeps > 0)
                assert 0 <= edit.seat < limits.max_seats
                self._opened.add(edit.seat)
            elif isinstance(edit, Close):
                self._opened.remove(edit.seat)
        busy = [*step.decode, *(chunk.seat for chunk in step.prompts)]
        assert len(set(busy)) == len(busy), "a seat twice in a step"
        assert set(busy) <= self._opened
        assert len(step.prompts) <= limits.max_prompts
        assert sum(len(chunk.tokens) for chunk in step.prompts) <= limits.max_step_tokens

    def _run(self, step: Step, answers: list[list[tuple[int, int]]]) -> None:
        for edit in step.edits:
            self._apply(edit)
        self._check_pages(step)
        groups = iter(answers)
        if step.decode:
            found = next(groups)
            for seat in step.decode:
                held = self._seats[seat]
                token = step.forced.get(seat, held.token)
                assert token is not None, f"seat {seat} holds no token"
                self._write(held, token)
                found.append(self._choose(held))
        for chunk in step.prompts:
            self._prompt(chunk)
            if chunk.chooses:
                next(groups).append(self._choose(self._seats[chunk.seat]))

    def _prompt(self, chunk: Chunk) -> None:
        held = self._seats[chunk.seat]
        assert chunk.start == held.length or self._is_shared(held, chunk.start), "a gap"
        held.length = chunk.start
        for token in chunk.tokens:
            self._write(held, token)
        held.token = None

    def _is_shared(self, held: _Held, start: int) -> bool:
        """Whether a seat finds what others have computed in its first pages."""
        return held.length == 0 and self.capabilities.page_size > 0 and start > 0

    def _apply(self, edit: Edit) -> None:
        if isinstance(edit, Open):
            own = [] if self.capabilities.page_size else [edit.seat]
            if edit.keeps:
                held = self._seats[edit.seat]
                length, whole = held.length, self.capabilities.has_sequence_state
                assert edit.keeps == length if whole else edit.keeps <= length
            elif own:
                self._memory[edit.seat] = {}
            self._seats[edit.seat] = _Held(edit.choosing, own, edit.keeps)
        elif isinstance(edit, Close):
            del self._seats[edit.seat]
        else:
            assert isinstance(edit, Pages), edit
            held = self._seats[edit.seat]
            assert edit.first <= len(held.pages)
            held.pages[edit.first :] = edit.ids

    def _check_pages(self, step: Step) -> None:
        """No page is written by a seat while another has it."""
        size = self.capabilities.page_size
        if not size:
            return
        owners: dict[int, int] = {}
        for held in self._seats.values():
            for page in held.pages:
                owners[page] = owners.get(page, 0) + 1
        spans = [(seat, self._seats[seat].length, 1) for seat in step.decode]
        spans += [(chunk.seat, chunk.start, len(chunk.tokens)) for chunk in step.prompts]
        for seat, start, count in spans:
            for at in range(start // size, (start + count - 1) // size + 1):
                assert owners[self._seats[seat].pages[at]] == 1, f"seat {seat} writes a shared page"

    def _write(self, held: _Held, token: int) -> None:
        size = self.capabilities.page_size or self.capabilities.max_context
        page = held.pages[held.length // size]
        self._memory.setdefault(page, {})[held.length % size] = token
        held.length += 1

    def _choose(self, held: _Held) -> tuple[int, int]:
        size = self.capabilities.page_size or self.capabilities.max_context
        history = [self._memory[held.pages[at // size]][at % size] for at in range(held.length)]
        facts = (history, held.choosing.seed, held.length)
        held.token = zlib.crc32(repr(facts).encode()) % VOCAB
        return held.token, int(held.token in held.choosing.end_tokens)

    def _work_off(self) -> None:
        for job in self._queue:
            job()
        self._queue.clear()

    def reset(self) -> None:
        self._work_off()
        self._seats.clear()
        self._opened.clear()

    @property
    def num_open(self) -> int:
        """Seats that somebody has."""
        return len(self._opened)

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0
