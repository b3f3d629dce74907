"""A device that works when it is waited for: steps are queued, and run in order when one is read.

What it answers depends on a sequence's whole history and on seed and position, so a token, a
position or a state that is not the right one changes the answers.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from tilewright.compiler.targets.base import (
    Capabilities,
    Executable,
    MemoryUse,
    StateHandle,
    StepInput,
    StepOutput,
)
from tilewright.compiler.targets.contract import NumericContract
from tilewright.compiler.targets.slots import SlotPool

VOCAB = 23


class Clock:
    """Seconds that pass only where they are spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueuedExecutable(Executable):
    """``log`` holds ``("launch", n)`` and ``("read", n)`` of steps that choose tokens, n from 0.

    A step takes ``step_seconds`` of the clock on the device, one after another, and giving it to
    the device ``host_seconds``.
    """

    vocab_size = VOCAB

    def __init__(self, *, clock: Clock | None = None, **capabilities: Any) -> None:
        limits: dict[str, Any] = {
            "max_batch": 4,
            "max_context": 64,
            "max_prefill_sequences": 1,
            "mixed_steps": False,
            "runs_ahead": True,
        }
        self.capabilities = Capabilities(**{**limits, **capabilities})
        self.contract = NumericContract((), ())
        self.log: list[tuple[str, int]] = []
        self.given: list[StepInput] = []
        self.num_continued = 0
        self.clock = clock or Clock()
        self.step_seconds = self.host_seconds = 0.0
        self._device_free_at = 0.0
        self._slots = SlotPool(self.capabilities.max_batch, self.capabilities.max_context)
        self._reserved: dict[StateHandle, int] = {}
        self._queue: list[Callable[[], None]] = []
        self._unread: dict[int, tuple[StateHandle, ...]] = {}
        self._memory: dict[StateHandle, list[int]] = {}
        self._chosen: list[int] = []
        self._num_sampled = 0

    def step(self, inputs: StepInput) -> StepOutput:
        last = self.given[-1] if self.given else None
        is_next = inputs.continues(last)
        self.num_continued += is_next
        self.given.append(inputs)
        if not is_next:
            inputs = inputs.settled()
        self._check(inputs)
        number = self._num_sampled
        size = len(inputs.logit_rows) if inputs.sampling is not None else 0
        answer = torch.full((size,), -1), torch.zeros(size, dtype=torch.bool)
        self.clock.now += self.host_seconds
        done = max(self._device_free_at, self.clock.now) + self.step_seconds
        self._device_free_at = done
        self._queue.append(lambda: self._run(inputs, is_next, answer))
        if inputs.sampling is None:
            return StepOutput()
        self._num_sampled += 1
        self._unread[number] = inputs.states
        assert len(self._unread) <= 2, "more than one step ahead"
        self.log.append(("launch", number))

        def arrived() -> tuple[list[int], list[bool]]:
            if number in self._unread:
                self._work_off()
                self._unread = {n: states for n, states in self._unread.items() if n > number}
                self.log.append(("read", number))
                self.clock.now = max(self.clock.now, done)
            return answer[0].tolist(), answer[1].tolist()

        return StepOutput(*answer, None, arrived)

    def _check(self, inputs: StepInput) -> None:
        for handle, end in zip(inputs.states, inputs.cu_seqlens.tolist()[1:], strict=True):
            last = int(inputs.positions[end - 1]) + inputs.advanced
            assert last < self._reserved[handle], f"position {last} was not reserved"

    def _run(self, inputs: StepInput, is_next: bool, answer: tuple[torch.Tensor, ...]) -> None:
        tokens = self._chosen if is_next else inputs.tokens.tolist()
        positions = (inputs.positions + inputs.advanced).tolist()
        for handle, (start, end) in zip(
            inputs.states, pairwise(inputs.cu_seqlens.tolist()), strict=True
        ):
            held = self._memory[handle]
            wanted = list(range(len(held), len(held) + end - start))
            assert positions[start:end] == wanted, f"{positions[start:end]}, wanted {wanted}"
            held += tokens[start:end]
        if inputs.sampling is None:
            return
        batch, rows = inputs.sampling, inputs.logit_rows.tolist()
        bounds = inputs.cu_seqlens.tolist()
        seeds, places = batch.seeds.tolist(), (batch.positions + inputs.advanced).tolist()
        histories = [self._memory[inputs.states[bisect_right(bounds, row) - 1]] for row in rows]
        self._chosen = [
            zlib.crc32(repr(facts).encode()) % VOCAB
            for facts in zip(histories, seeds, places, strict=True)
        ]
        answer[0][:] = torch.tensor(self._chosen)
        answer[1][:] = (answer[0].unsqueeze(-1) == batch.end_tokens).any(-1)

    def _work_off(self) -> None:
        for job in self._queue:
            job()
        self._queue.clear()

    def reserve(self, num_positions: int) -> StateHandle:
        handle = self._slots.reserve(num_positions)
        self._reserved[handle] = num_positions
        self._queue.append(lambda: self._memory.__setitem__(handle, []))
        return handle

    def free(self, handle: StateHandle) -> None:
        for number, states in self._unread.items():
            assert handle not in states, f"state {handle} is freed while step {number} is queued"
        self._slots.free(handle)
        del self._reserved[handle]
        self._queue.append(lambda: self._memory.__delitem__(handle))

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        raise NotImplementedError

    def num_free(self) -> int:
        return self._slots.num_free()

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int) -> int:
        return 0
