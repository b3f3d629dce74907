"""The executable of an emulated board: a program for prefill, a program for decode, and caches."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import (
    Capabilities,
    CompileOptions,
    MemoryUse,
    Slot,
)
from tilewright.compiler.targets.interface.step import StateSnapshot
from tilewright.compiler.targets.interface.threads import torch_threads
from tilewright.compiler.targets.tenstorrent.emulate.run import Emulator, EmulatorBatch
from tilewright.compiler.targets.tenstorrent.program.chips import PerChip
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram
from tilewright.compiler.targets.tenstorrent.program.memory_plan import plan_memory

_NUM_SNAPSHOTS = 64


class EmulatedExecutable(HostExecutable):
    """A board's arithmetic on this machine. The emulator's speed is unrelated to the board's.

    A forward has a prefill chunk, or a token per slot.
    """

    def __init__(
        self,
        prefill: DeviceProgram,
        decode: DeviceProgram,
        weights: Mapping[str, PerChip],
        options: CompileOptions,
        contract: NumericContract,
    ) -> None:
        super().__init__()
        self.contract = contract
        self.capabilities = Capabilities(
            max_num_seqs=options.max_batch,
            max_context=options.max_context,
            cell=32,
            num_snapshots=_NUM_SNAPSHOTS if decode.states else 0,
            has_sequence_state=bool(decode.states),
            has_decode_chunks=True,
        )
        self.vocab_size = decode.vocab_size
        self.device_name = decode.device
        self.device_detail = f"emulated on {emulation_device().type}"
        self._prefill, self._decode = prefill, decode
        self._device = emulation_device()
        self._num_threads = options.num_threads
        self._caches = {cache.name: PerChip(decode.mesh, cache.over) for cache in decode.caches}
        for cache in decode.caches:
            shape = (options.max_batch, options.max_context, cache.num_heads, cache.head_dim)
            per_chip = self._caches[cache.name]
            for chip in per_chip.chips():
                per_chip[chip] = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        self._states = {state.name: PerChip(decode.mesh, state.over) for state in decode.states}
        for state in decode.states:
            of_state = self._states[state.name]
            for chip in of_state.chips():
                of_state[chip] = torch.zeros((options.max_batch, *state.shape), device=self._device)
        self._snapshots: dict[StateSnapshot, tuple[int, list[Tensor]]] = {}
        self._emulator = Emulator(weights, ChainMap(self._caches, self._states))
        self._plan = plan_memory(decode)

    def forward(self, batch: Batch) -> np.ndarray:
        bounds, slots = batch.cu_seqlens, np.array(batch.slots)
        if batch.decodes:  # A decode row is a sequence
            bounds, slots = np.arange(len(batch.tokens) + 1), slots.repeat(np.diff(bounds))
        work = EmulatorBatch(
            tokens=torch.from_numpy(batch.tokens).to(self._device),
            positions=torch.from_numpy(batch.positions).to(self._device),
            first_positions=tuple(batch.positions[bounds[:-1]].tolist()),
            logit_rows=torch.from_numpy(batch.logit_rows).to(self._device),
            bounds=tuple(bounds.tolist()),
            slots=tuple(slots.tolist()),
        )
        program = self._decode if batch.decodes else self._prefill
        with torch_threads(self._num_threads):
            logits = self._emulator.run(program, work)
        return logits.float().cpu().numpy()

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        for tensor in self._parts(self._caches):
            tensor[target, :num_positions] = tensor[source, :num_positions]
        for tensor in self._parts(self._states):
            tensor[target] = tensor[source]

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        kept = [tensor[slot].clone() for tensor in self._parts(self._states)]
        self._snapshots[snapshot] = self.length(slot), kept

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        position, kept = self._snapshots[snapshot]
        for tensor, values in zip(self._parts(self._states), kept, strict=True):
            tensor[slot] = values
        return position

    def memory(self) -> MemoryUse:
        """Return planned bytes of the chips, not the emulator's."""
        chips = self._decode.mesh.num_chips
        return MemoryUse(self._plan.weight_bytes * chips, self._plan.cache_bytes * chips)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Return the state bytes on all chips, in whole pages."""
        chips = self._decode.mesh.num_chips
        pages = sum(
            cache.num_bytes // cache.num_pages * -(-num_positions // cache.page)
            for cache in self._decode.caches
        )
        states = sum(state.num_bytes // state.num_slots for state in self._decode.states)
        return chips * (pages + num_sequences * states)

    def cached_heads(self, slot: Slot, num_positions: int) -> dict[str, Tensor]:
        """Return cached values ``[heads, positions, head_dim]`` by cache, for all chips."""
        return {
            name: torch.cat(
                [cache[slot, :num_positions] for cache in self._parts({name: caches})], 1
            )
            .transpose(0, 1)
            .float()
            for name, caches in self._caches.items()
        }

    def close(self) -> None:
        self._caches.clear()
        self._states.clear()

    @staticmethod
    def _parts(by_name: Mapping[str, PerChip]) -> list[Tensor]:
        return [tensor for per_chip in by_name.values() for tensor in per_chip.parts().values()]


def emulation_device() -> torch.device:
    """Return the device for emulation: a GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
