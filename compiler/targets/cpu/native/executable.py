"""Executable for the native library: tokens in, logits out, caches in its slots."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import numpy as np

from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.native import times
from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.memory import (
    are_large_pages_worth,
    reach_back,
    windows_of,
)
from tilewright.compiler.targets.cpu.native.program.bundle import MAX_TOKENS, Packed, program_of
from tilewright.compiler.targets.cpu.native.program.mapping import Mapped
from tilewright.compiler.targets.cpu.native.settings import prints_times
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable, with_all_rows
from tilewright.compiler.targets.interface.base import Capabilities, CompileOptions, MemoryUse, Slot
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.interface.step import StateSnapshot
from tilewright.compiler.targets.tile_encoder import NARROW, TileEncoderSettings

_NUM_SNAPSHOTS = 64


class NativeExecutable(HostExecutable):
    """An engine of the library for both phases. A batch row's bits depend on its request only."""

    device_name = "CPU (native)"

    def __init__(
        self,
        packed: Packed,
        mapped: Mapped,
        options: CompileOptions,
        contract: NumericContract,
        *,
        isa: int = -1,
    ) -> None:
        super().__init__()
        self.contract = contract
        self.vocab_size = packed.vocab_size
        has_own = packed.has_sequence_state
        retained_positions, back = reach_back(windows_of(packed, options.max_context))
        self.capabilities = Capabilities(
            max_num_seqs=options.max_batch,
            max_context=options.max_context,
            num_snapshots=_NUM_SNAPSHOTS if has_own else 0,
            has_sequence_state=has_own,
            retained_positions=retained_positions,
            reach_back=back,
            invariant="rows",
            hidden_size=packed.hidden_size,
            max_drafts=_max_drafts(options, has_own),
        )
        library = lib.library(every_isa=isa >= 0)
        used = library.tw_best_isa() if isa < 0 else isa
        self.device_detail = _described(lib.ISA_NAMES[used], options.num_threads or 1)
        self._library = library
        self._lengths = [0] * options.max_batch
        self._is_hidden = False
        self._carried: np.ndarray | None = None
        self._image_inputs: _ImageInputs | None = None
        self._cross_inputs: _CrossInputs | None = None
        self._times: times.Times | None = None
        self._weight_bytes = sum(each.num_bytes for each in packed.tensors)
        large_pages = are_large_pages_worth(self._weight_bytes)
        self._mapped = mapped  # the engine reads it until closed
        self._engine: int | None = lib.open_engine(
            program_of(packed, mapped, options, isa=isa, large_pages=large_pages)
        )
        if prints_times():
            self._times = times.Times(self._engine, packed)
        self._sequence_bytes = int(library.tw_sequence_bytes(self._engine))
        self._states_by_token = np.empty((0, 0), np.uint8)
        self._snapshots: dict[StateSnapshot, tuple[int, np.ndarray]] = {}

    def forward(self, batch: Batch) -> np.ndarray:
        return self._results(batch, self.vocab_size)

    def forward_drafts(self, batch: Batch) -> np.ndarray:
        if not self._sequence_bytes:
            return self.forward(batch)
        self._states_by_token = np.empty((len(batch.tokens), self._sequence_bytes), np.uint8)
        self._library.tw_keep_rows(self._opened(), self._states_by_token.ctypes.data)
        try:
            return self.forward(batch)
        finally:
            self._library.tw_keep_rows(self._opened(), None)

    def roll_back(self, slot: Slot, last: int) -> None:
        if self._sequence_bytes:
            self._library.tw_load(self._opened(), slot, self._states_by_token[last].ctypes.data)

    def hidden(self, batch: Batch) -> np.ndarray:
        self._is_hidden = True
        try:
            return self._results(with_all_rows(batch), self.capabilities.hidden_size)
        finally:
            self._is_hidden = False

    def _results(self, batch: Batch, width: int) -> np.ndarray:
        """Return the logits for a batch's rows, or their hidden states."""
        tokens, positions, bounds, rows = (
            each.astype(np.int32)
            for each in (batch.tokens, batch.positions, batch.cu_seqlens, batch.logit_rows)
        )
        slots = np.array(batch.slots, dtype=np.int32)
        found = np.empty((len(rows), width), np.float32)
        if self.keeps_hidden and not self._is_hidden:
            self.last_hidden = np.empty((len(tokens), self.capabilities.hidden_size), np.float32)
        self._carried = batch.hidden
        self._image_inputs = _ImageInputs.of(batch)
        self._cross_inputs = _CrossInputs.of(batch)
        if len(tokens) <= MAX_TOKENS:
            self._run(tokens, positions, bounds, slots, rows, found, batch.decodes)
        else:
            self._run_cut(tokens, positions, bounds, slots, rows, found, batch.decodes)
        for slot, end in zip(batch.slots, bounds[1:].tolist(), strict=True):
            self._lengths[slot] = int(positions[end - 1]) + 1
        return found

    def _run_cut(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        bounds: np.ndarray,
        slots: np.ndarray,
        rows: np.ndarray,
        found: np.ndarray,
        decodes: bool,
    ) -> None:
        """Run more tokens than the library's limit, in several calls."""
        ends = None if self._image_inputs is None else self._image_inputs.ends
        last = 0
        while last < len(tokens):
            first, last = last, min(last + MAX_TOKENS, len(tokens))
            if ends is not None:  # an image is not cut
                last = whole_images(ends - positions[0], first, last)
            selected = [
                at for at in range(len(slots)) if bounds[at] < last and bounds[at + 1] > first
            ]
            cuts = [max(int(bounds[at]), first) - first for at in selected]
            wanted = np.flatnonzero((rows >= first) & (rows < last))
            part = np.empty((len(wanted), found.shape[1]), np.float32)
            self._run(
                np.ascontiguousarray(tokens[first:last]),
                np.ascontiguousarray(positions[first:last]),
                np.array([*cuts, last - first], dtype=np.int32),
                slots[selected],
                (rows[wanted] - first).astype(np.int32),
                part,
                decodes,
                first,
            )
            found[wanted] = part

    def _run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        bounds: np.ndarray,
        slots: np.ndarray,
        rows: np.ndarray,
        found: np.ndarray,
        decodes: bool,
        first: int = 0,
    ) -> None:
        step = lib.TwStep(
            num_tokens=len(tokens),
            num_sequences=len(slots),
            num_rows=len(rows),
            decodes=decodes,
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            bounds=bounds.ctypes.data,
            slots=slots.ctypes.data,
            rows=rows.ctypes.data,
            logits=None if self._is_hidden else found.ctypes.data,
            hidden=found.ctypes.data if self._is_hidden else None,
        )
        if self.keeps_hidden and not self._is_hidden:
            step.hidden = self.last_hidden[first:].ctypes.data
        if self._carried is not None:
            step.carried = self._carried[first:].ctypes.data
        if self._image_inputs is not None:
            self._image_inputs.complete(step, first)
        if self._cross_inputs is not None:
            self._cross_inputs.complete(step, first)
        self._complete(step)
        failed = self._library.tw_step(self._opened(), ctypes.byref(step))
        self._check(failed)

    def _complete(self, step: lib.TwStep) -> None:
        """Add fields to the library's step structure."""

    def _check(self, failed: int) -> None:
        assert not failed, "the step does not fit the program"
        if self._times is not None:
            self._times.count_step()

    @property
    def image_value_bytes(self) -> int:
        return 2 if self._has_narrow_images else 4

    @property
    def _has_narrow_images(self) -> bool:
        """Return whether bfloat16 has all values of an image's keys and values."""
        settings = None if self.encoder is None else self.encoder.settings
        return isinstance(settings, TileEncoderSettings) and settings.cache_format in NARROW

    def stored_image(self, values: np.ndarray) -> np.ndarray:
        if not self._has_narrow_images:
            return values
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        self._library.tw_copy(self._opened(), source, target, num_positions)
        self._lengths[target] = num_positions

    def clear_state(self, slot: Slot) -> None:
        if self._lengths[slot]:
            self._lengths[slot] = 0
            self._library.tw_clear(self._opened(), slot)

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        kept = np.empty(self._sequence_bytes, dtype=np.uint8)
        self._library.tw_save(self._opened(), slot, kept.ctypes.data)
        self._snapshots[snapshot] = self.length(slot), kept

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        position, kept = self._snapshots[snapshot]
        self._library.tw_load(self._opened(), slot, kept.ctypes.data)
        self._lengths[slot] = max(self._lengths[slot], position)
        return position

    def memory(self) -> MemoryUse:
        state = sum(self._library.tw_slot_bytes(self._opened(), each) for each in self._lengths)
        own = self._sequence_bytes * sum(each > 0 for each in self._lengths)
        return MemoryUse(self._weight_bytes, state + own)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Return the bytes for evenly distributed positions: a window limits the state of each
        sequence.

        For zero sequences, return the bytes of the positions only.
        """
        num_parts = max(num_sequences, 1)
        each, longer = divmod(num_positions, num_parts)
        found = num_sequences * self._sequence_bytes
        for length, count in ((each, num_parts - longer), (each + 1, longer)):
            found += count * int(self._library.tw_slot_bytes(self._opened(), length))
        return found

    def _opened(self) -> int:
        """Return the engine. A closed engine must not reach the library."""
        assert self._engine is not None, "the executable is closed"
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            if self._times is not None:
                print(self._times.text(), file=sys.stderr)
            self._library.tw_close(self._engine)
            self._engine = None
        if self.draft_layer is not None:
            self.draft_layer.executable.close()


def _max_drafts(options: CompileOptions, has_state: bool) -> int:
    """Return the maximum drafts per slot. A call stores the state after every token."""
    if not has_state:
        return MAX_DRAFTS
    return max(0, min(MAX_DRAFTS, MAX_TOKENS // options.max_batch - 1))


def whole_images(ends: np.ndarray, first: int, last: int) -> int:
    """Return ``last``, or the start of an image that a call with tokens ``first`` to ``last`` would
    cut.

    ``ends``: Index after the last visible token, per token.
    """
    cut = np.flatnonzero(ends[first:last] > last)
    assert not len(cut) or cut[0], "an image has more tokens than a call"
    return first + int(cut[0]) if len(cut) else last


@dataclass(frozen=True, slots=True)
class _ImageInputs:
    """Image inputs to a forward, as in `TwStep`. ``rotary`` None: as the positions."""

    rows: np.ndarray
    embeddings: np.ndarray
    rotary: np.ndarray | None
    ends: np.ndarray | None

    @classmethod
    def of(cls, batch: Batch) -> _ImageInputs | None:
        """Return a batch's image inputs. None: text only."""
        if not batch.has_images:
            return None
        rows = np.full(len(batch.tokens), -1, np.int32)
        embeddings = np.empty((0, 0), np.float32)
        if batch.image_tokens is not None and batch.embeddings is not None:
            rows[batch.image_tokens] = np.arange(len(batch.image_tokens))
            embeddings = np.ascontiguousarray(batch.embeddings, np.float32)
        rotary = None if batch.rotary is None else batch.rotary.astype(np.int32)
        ends = None if batch.ends is None else batch.ends.astype(np.int32)
        return cls(rows, embeddings, rotary, ends)

    def complete(self, step: lib.TwStep, first: int) -> None:
        """Add the fields for the tokens from ``first``."""
        step.image_rows = self.rows[first:].ctypes.data
        step.embeddings = self.embeddings.ctypes.data
        if self.rotary is not None:
            step.rotary = self.rotary[first:].ctypes.data
        if self.ends is not None:
            step.ends = self.ends[first:].ctypes.data


@dataclass(frozen=True, slots=True)
class _CrossInputs:
    """Images for cross-attention in a forward, as in `TwStep`. ``rows`` keeps their memory."""

    visible: np.ndarray
    rows: tuple[np.ndarray, ...]
    addresses: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> _CrossInputs | None:
        """Return a batch's images. None: no token sees an image."""
        if batch.visible is None:
            return None
        rows = tuple(map(np.ascontiguousarray, batch.cross_rows))
        addresses = np.array([values.ctypes.data for values in rows], np.uint64)
        counts = np.array([len(values) for values in rows], np.int32)
        return cls(batch.visible.astype(np.int32), rows, addresses, counts)

    def complete(self, step: lib.TwStep, first: int) -> None:
        """Add the fields for the tokens from ``first``."""
        step.visible = self.visible[first:].ctypes.data
        step.cross = self.addresses.ctypes.data
        step.cross_rows = self.counts.ctypes.data
        step.num_images, step.cross_width = len(self.rows), self.rows[0].shape[1]
        step.cross_bits = 8 * self.rows[0].itemsize


def _described(isa: str, num_threads: int) -> str:
    """Return the processor and its used features. More threads than cores are allowed and
    reported.
    """
    cpu = describe_cpu()
    found = f"{cpu.model_name}, {isa}"
    if num_threads > cpu.num_cores:
        found += f", {num_threads} threads on {cpu.num_cores} cores"
    return found
