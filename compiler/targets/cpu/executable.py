"""Runs steps on one ONNX Runtime session over contiguous cache slots.

Decode rows run as windows of neighbouring slots; a slot inside a window that is not stepped gets a
dummy row, whose write behind its last position is overwritten by its next real token; state that
does not grow is put back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from tilewright.compiler.targets.base import (
    Capabilities,
    CompileOptions,
    Executable,
    MemoryUse,
    StateHandle,
    StepInput,
    StepOutput,
    finish_step,
)
from tilewright.compiler.targets.contract import NumericContract
from tilewright.compiler.targets.cpu.cache import SlotCaches, SlotStates, padded_length
from tilewright.compiler.targets.cpu.model_file import OpenModel
from tilewright.compiler.targets.slots import SlotPool, check_copy
from tilewright.compiler.targets.threads import single_torch_thread

_MAX_GAP = 4
"""Idle slots a decode window may span: beyond that a second run costs less than dummy rows."""
_MAX_BINDINGS = 16


@dataclass(slots=True)
class Window:
    """A prepared call: ``num_rows`` slots from ``first``, ``length`` tokens each."""

    binding: ort.IOBinding
    tokens: np.ndarray
    last_positions: np.ndarray
    total_length: np.ndarray
    logit_rows: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class LastDecode:
    """A decode step whose sequences filled one window, in order, all with logits."""

    states: tuple[StateHandle, ...]
    rows: Tensor
    window: Window


class CpuExecutable(Executable):
    """One session, one graph, both phases."""

    def __init__(
        self, model: OpenModel, options: CompileOptions, contract: NumericContract
    ) -> None:
        self.contract = contract
        self.capabilities = Capabilities(
            max_batch=options.max_batch,
            max_context=options.max_context,
            max_prefill_sequences=1,
            mixed_steps=False,
        )
        self.vocab_size = model.vocab_size
        self._session = model.session
        self._weight_bytes = model.weight_bytes
        length = padded_length(model.caches, options.max_context)
        self._caches = SlotCaches(model.caches, options.max_batch, length)
        self._states = SlotStates(model.states, options.max_batch)
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._lengths = [0] * options.max_batch
        self._windows: OrderedDict[tuple[int, int, int, int], Window] = OrderedDict()
        self._last: LastDecode | None = None

    def step(self, inputs: StepInput) -> StepOutput:
        logits = self._continue(inputs)
        if logits is None:
            logits = self._start(inputs)
        if inputs.want_logits:
            # the buffer is used again; NumPy copies it without waking torch's threads
            logits = torch.from_numpy(logits.numpy().copy())
        if inputs.sampling is None or inputs.sampling.is_greedy:
            return finish_step(logits, inputs)
        with single_torch_thread():
            return finish_step(logits, inputs)

    def _continue(self, inputs: StepInput) -> Tensor | None:
        """The next decode step of the same sequences in the same window; None for any other.

        A step reads its weights through every cache, so what the host does between two is slow:
        here it does as little as it can.
        """
        last = self._last
        if last is None or last.states is not inputs.states or last.rows is not inputs.logit_rows:
            return None
        last.window.tokens[:, 0] = inputs.tokens.numpy()
        last.window.last_positions[:] = inputs.positions.numpy()
        for slot, position in zip(inputs.states, inputs.positions.tolist(), strict=True):
            self._lengths[slot] = position + 1
        return self._run(last.window)

    def _start(self, inputs: StepInput) -> Tensor:
        bounds = inputs.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        assert len(inputs.states) == 1 or max(lengths) == 1, "phases or prefills were mixed"
        for handle in inputs.states:
            assert handle in self._slots, f"state {handle} is not reserved"
        self._last = None
        logits = self._prefill(inputs) if lengths[0] > 1 else self._decode(inputs)
        for handle, end in zip(inputs.states, bounds[1:], strict=True):
            self._lengths[handle] = int(inputs.positions[end - 1]) + 1
        return logits

    def _prefill(self, inputs: StepInput) -> Tensor:
        slot, num_tokens = inputs.states[0], len(inputs.tokens)
        window = self._window(slot, slot + 1, num_tokens, len(inputs.logit_rows))
        window.tokens[0] = inputs.tokens.numpy()
        window.last_positions[0] = int(inputs.positions[-1])
        window.logit_rows[:] = inputs.logit_rows.numpy()
        return self._run(window)

    def _decode(self, inputs: StepInput) -> Tensor:
        row_of = {int(slot): row for row, slot in enumerate(inputs.states)}
        tokens, positions = inputs.tokens.tolist(), inputs.positions.tolist()
        wanted = {row: index for index, row in enumerate(inputs.logit_rows.tolist())}
        parts, order = [], []
        for first, last in plan_windows(sorted(row_of), _MAX_GAP):
            rows = [row_of.get(slot) for slot in range(first, last)]
            shown = [at for at, row in enumerate(rows) if row in wanted]
            window = self._window(first, last, 1, len(shown))
            for at, row in enumerate(rows):
                window.tokens[at, 0] = 0 if row is None else tokens[row]
                place = self._lengths[first + at] if row is None else positions[row]
                window.last_positions[at] = place
            window.logit_rows[:] = shown
            idle = self._idle_states(first, rows)
            parts.append(self._run(window))
            for slot, pieces in idle.items():
                self._states.write(slot, pieces)
            order += [wanted[row] for at in shown if (row := rows[at]) is not None]
        if len(parts) == 1 and rows == order == list(range(len(rows))):
            self._last = LastDecode(inputs.states, inputs.logit_rows, window)
        if order == sorted(order):
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        logits = torch.empty(len(order), self.vocab_size)
        logits[order] = torch.cat(parts)
        return logits

    def _idle_states(self, first: int, rows: list[int | None]) -> dict[int, list[np.ndarray]]:
        """By slot, what the sequences of a window's dummy rows keep that does not grow."""
        if not self._states.specs:
            return {}
        idle = (first + at for at, row in enumerate(rows) if row is None)
        return {slot: self._states.read(slot) for slot in idle if self._lengths[slot]}

    def _run(self, window: Window) -> Tensor:
        """Run a prepared call; its logits are overwritten when the window runs again."""
        window.total_length[...] = window.last_positions.max() + 1
        self._session.run_with_iobinding(window.binding)
        return torch.from_numpy(window.logits)

    def _window(self, first: int, last: int, length: int, num_logits: int) -> Window:
        """A prepared call; decode reuses the last few, so a step binds nothing anew."""
        key = (first, last, length, num_logits)
        if key in self._windows:
            self._windows.move_to_end(key)
            return self._windows[key]
        num_rows = last - first
        window = Window(
            binding=self._session.io_binding(),
            tokens=np.zeros((num_rows, length), dtype=np.int64),
            last_positions=np.zeros(num_rows, dtype=np.int32),
            total_length=np.zeros((), dtype=np.int32),
            logit_rows=np.zeros(num_logits, dtype=np.int64),
            logits=np.zeros((num_logits, self.vocab_size), dtype=np.float32),
        )
        binding = window.binding
        for name in ("tokens", "last_positions", "total_length", "logit_rows"):
            array = getattr(window, name)
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        logits = window.logits
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        held = (*self._caches.bindings(first, last), *self._states.bindings(first, last))
        for name, shape, address in held:
            binding.bind_input(name, "cpu", 0, np.float32, shape, address)
            binding.bind_output(f"{name}.out", "cpu", 0, np.float32, shape, address)
        self._windows[key] = window
        if len(self._windows) > _MAX_BINDINGS:
            self._windows.popitem(last=False)
        return window

    def reserve(self, num_positions: int) -> StateHandle:
        handle = self._slots.reserve(num_positions)
        self._lengths[handle] = 0
        return handle

    def free(self, handle: StateHandle) -> None:
        self._slots.free(handle)
        self._lengths[handle] = 0
        self._last = None
        self._caches.release(handle)
        self._states.release(handle)

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        if self._states.specs:
            check_copy(num_positions, self._lengths[handle])
        fresh = self._slots.reserve(max(1, num_positions))
        self._caches.copy(handle, fresh, num_positions)
        self._states.copy(handle, fresh)
        self._lengths[fresh] = num_positions
        return fresh

    def num_free(self) -> int:
        return self._slots.num_free()

    def memory(self) -> MemoryUse:
        num_started = sum(length > 0 for length in self._lengths)
        state = self._caches.num_bytes(sum(self._lengths)) + num_started * self._states.slot_bytes
        return MemoryUse(self._weight_bytes, state)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        own = num_sequences * self._states.slot_bytes
        return self._caches.num_bytes(num_positions) + own

    def close(self) -> None:
        self._windows.clear()
        self._last = None
        del self._session, self._caches, self._states


def plan_windows(slots: list[int], max_gap: int) -> list[tuple[int, int]]:
    """Half-open ranges over the sorted ``slots``, none with more than ``max_gap`` idle in a row."""
    windows: list[tuple[int, int]] = []
    for slot in slots:
        if windows and slot - windows[-1][1] <= max_gap:
            windows[-1] = (windows[-1][0], slot + 1)
        else:
            windows.append((slot, slot + 1))
    return windows
