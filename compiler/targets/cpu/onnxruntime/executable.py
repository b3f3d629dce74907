"""Executable for an ONNX Runtime session over contiguous cache slots.

Decode rows run in adjacent slot windows. An idle slot inside a window gets a dummy row. Its
write after the last position is overwritten by the next token. Constant-size state is restored.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.onnxruntime.cache import SlotCaches, SlotStates, padded_length
from tilewright.compiler.targets.cpu.onnxruntime.emitter import HIDDEN
from tilewright.compiler.targets.cpu.onnxruntime.model_file import OpenModel
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import (
    Capabilities,
    CompileOptions,
    MemoryUse,
    Slot,
)
from tilewright.compiler.targets.interface.step import StateSnapshot

_MAX_GAP = 4
"""Maximum consecutive idle slots in a decode window. Beyond this, a second run is cheaper."""
_MAX_BINDINGS = 16
_NUM_SNAPSHOTS = 64


@dataclass(slots=True)
class Window:
    """A prepared call: ``num_rows`` slots from ``first``, with ``length`` tokens each."""

    binding: ort.IOBinding
    tokens: np.ndarray
    last_positions: np.ndarray
    total_length: np.ndarray
    logit_rows: np.ndarray
    logits: np.ndarray
    hidden: np.ndarray


@dataclass(frozen=True, slots=True)
class LastDecode:
    """A decode step with slots that fill a single window in order."""

    slots: tuple[Slot, ...]
    window: Window


class CpuExecutable(HostExecutable):
    """A compiled model on ONNX Runtime: a session and a graph for both phases."""

    def __init__(
        self, model: OpenModel, options: CompileOptions, contract: NumericContract
    ) -> None:
        super().__init__()
        self.contract = contract
        self.capabilities = Capabilities(
            max_num_seqs=options.max_batch,
            max_context=options.max_context,
            num_snapshots=_NUM_SNAPSHOTS if model.states else 0,
            has_sequence_state=bool(model.states),
            hidden_size=model.hidden_size,
        )
        self.vocab_size = model.vocab_size
        self._session = model.session
        self._weight_bytes = model.weight_bytes
        length = padded_length(model.caches, options.max_context)
        self._caches = SlotCaches(model.caches, options.max_batch, length)
        self._states = SlotStates(model.states, options.max_batch)
        self._lengths = [0] * options.max_batch
        self._windows: OrderedDict[tuple[int, ...], Window] = OrderedDict()
        self._snapshots: dict[StateSnapshot, tuple[int, list[np.ndarray]]] = {}
        self._last: LastDecode | None = None

    def forward(self, batch: Batch) -> np.ndarray:
        logits = self._continue(batch)
        if logits is None:
            self._last = None
            logits = self._decode(batch) if batch.decodes else self._prefill(batch)
        for slot, end in zip(batch.slots, batch.cu_seqlens[1:].tolist(), strict=True):
            self._lengths[slot] = int(batch.positions[end - 1]) + 1
        return logits

    def hidden(self, batch: Batch) -> np.ndarray:
        self._last = None
        self._prefill(batch, num_hidden=len(batch.tokens))
        (slot,) = batch.slots
        self._lengths[slot] = int(batch.positions[-1]) + 1
        return self._window(slot, slot + 1, len(batch.tokens), 0, len(batch.tokens)).hidden

    def _continue(self, batch: Batch) -> np.ndarray | None:
        """Run the next decode step of the same slots in the same window. Return None otherwise.

        Weights flow through every cache, so host work between steps is slow. Here it is minimal.
        """
        last = self._last
        if last is None or last.slots is not batch.slots or not batch.decodes:
            return None
        last.window.tokens[:, 0] = batch.tokens
        last.window.last_positions[:] = batch.positions
        return self._run(last.window)

    def _prefill(self, batch: Batch, num_hidden: int = 0) -> np.ndarray:
        slot, num_tokens = batch.slots[0], len(batch.tokens)
        window = self._window(slot, slot + 1, num_tokens, len(batch.logit_rows), num_hidden)
        window.tokens[0] = batch.tokens
        window.last_positions[0] = int(batch.positions[-1])
        window.logit_rows[:] = batch.logit_rows
        return self._run(window)

    def _decode(self, batch: Batch) -> np.ndarray:
        row_of = {int(slot): row for row, slot in enumerate(batch.slots)}
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        parts, order = [], []
        for first, last in plan_windows(sorted(row_of), _MAX_GAP):
            rows = [row_of.get(slot) for slot in range(first, last)]
            shown = [at for at, row in enumerate(rows) if row is not None]
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
            order += [row for row in rows if row is not None]
        if len(parts) == 1 and rows == order == list(range(len(rows))):
            self._last = LastDecode(batch.slots, window)
        if order == sorted(order):
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        logits = np.empty((len(order), self.vocab_size), np.float32)
        logits[order] = np.concatenate(parts)
        return logits

    def _idle_states(self, first: int, rows: list[int | None]) -> dict[int, list[np.ndarray]]:
        """Return the constant-size state of a window's dummy rows, by slot."""
        if not self._states.specs:
            return {}
        idle = (first + at for at, row in enumerate(rows) if row is None)
        return {slot: self._states.read(slot) for slot in idle if self._lengths[slot]}

    def _run(self, window: Window) -> np.ndarray:
        """Run a prepared call. The window's next run overwrites the logits."""
        window.total_length[...] = window.last_positions.max() + 1
        self._session.run_with_iobinding(window.binding)
        return window.logits

    def _window(
        self, first: int, last: int, length: int, num_logits: int, num_hidden: int = 0
    ) -> Window:
        """Return a prepared call. The last few calls are cached, so decode binds nothing again."""
        key = (first, last, length, num_logits, num_hidden)
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
            hidden=np.zeros((num_hidden, self.capabilities.hidden_size), dtype=np.float32),
        )
        binding = window.binding
        for name in ("tokens", "last_positions", "total_length", "logit_rows"):
            array = getattr(window, name)
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        logits, hidden = window.logits, window.hidden
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        if num_hidden:
            binding.bind_output(HIDDEN, "cpu", 0, np.float32, hidden.shape, hidden.ctypes.data)
        bindings = (*self._caches.bindings(first, last), *self._states.bindings(first, last))
        for name, shape, address in bindings:
            binding.bind_input(name, "cpu", 0, np.float32, shape, address)
            binding.bind_output(f"{name}.out", "cpu", 0, np.float32, shape, address)
        self._windows[key] = window
        if len(self._windows) > _MAX_BINDINGS:
            self._windows.popitem(last=False)
        return window

    def clear_state(self, slot: Slot) -> None:
        self._last = None
        if self._lengths[slot]:
            self._lengths[slot] = 0
            self._caches.release(slot)
            self._states.release(slot)

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        self._caches.copy(source, target, num_positions)
        self._states.copy(source, target)
        self._lengths[target] = num_positions

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        self._snapshots[snapshot] = self.length(slot), self._states.read(slot)

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        position, pieces = self._snapshots[snapshot]
        self._states.write(slot, pieces)
        return position

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
    """Return half-open ranges over sorted ``slots`` with up to ``max_gap`` consecutive idle
    slots.
    """
    windows: list[tuple[int, int]] = []
    for slot in slots:
        if windows and slot - windows[-1][1] <= max_gap:
            windows[-1] = (windows[-1][0], slot + 1)
        else:
            windows.append((slot, slot + 1))
    return windows
