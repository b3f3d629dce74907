"""The emulated board behind the narrow waist: one program a phase, caches in slots."""

from __future__ import annotations

from collections.abc import Mapping

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
from tilewright.compiler.targets.slots import SlotPool
from tilewright.compiler.targets.tenstorrent.chips import Dealt
from tilewright.compiler.targets.tenstorrent.emulate import Emulator, Work
from tilewright.compiler.targets.tenstorrent.memory_plan import plan_memory
from tilewright.compiler.targets.tenstorrent.program import DeviceProgram
from tilewright.compiler.targets.threads import torch_threads


class EmulatedExecutable(Executable):
    """A board's numbers from this machine; its speed says nothing of the board's.

    A step is a prompt of one sequence, or one token of each of several.
    """

    def __init__(
        self,
        prefill: DeviceProgram,
        decode: DeviceProgram,
        weights: Mapping[str, Dealt],
        options: CompileOptions,
        contract: NumericContract,
    ) -> None:
        self.contract = contract
        self.capabilities = Capabilities(
            max_batch=options.max_batch,
            max_context=options.max_context,
            max_prefill_sequences=1,
            mixed_steps=False,
        )
        self.vocab_size = decode.vocab_size
        self.device_name = decode.device
        self.device_detail = f"emulated on {emulation_device().type}"
        self._prefill, self._decode = prefill, decode
        self._device = emulation_device()
        self._num_threads = options.num_threads
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._caches = {cache.name: Dealt(decode.mesh, cache.over) for cache in decode.caches}
        for cache in decode.caches:
            shape = (options.max_batch, options.max_context, cache.num_heads, cache.head_dim)
            dealt = self._caches[cache.name]
            for chip in dealt.chips():
                dealt[chip] = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        self._emulator = Emulator(weights, self._caches)
        self._plan = plan_memory(decode)

    def step(self, inputs: StepInput) -> StepOutput:
        bounds = tuple(inputs.cu_seqlens.tolist())
        is_decode = len(inputs.tokens) == len(inputs.states)
        assert is_decode or len(inputs.states) == 1, "phases or prefills were mixed"
        for handle in inputs.states:
            assert handle in self._slots, f"state {handle} is not reserved"
        work = Work(
            tokens=inputs.tokens.to(self._device),
            positions=inputs.positions.to(self._device),
            first_positions=tuple(inputs.positions[list(bounds[:-1])].tolist()),
            logit_rows=inputs.logit_rows.to(self._device),
            bounds=bounds,
            slots=tuple(int(handle) for handle in inputs.states),
        )
        program = self._decode if is_decode else self._prefill
        with torch_threads(self._num_threads):
            logits = self._emulator.run(program, work)
        return finish_step(logits.cpu(), inputs)

    def reserve(self, num_positions: int) -> StateHandle:
        return self._slots.reserve(num_positions)

    def free(self, handle: StateHandle) -> None:
        self._slots.free(handle)

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        fresh = self._slots.reserve(max(1, num_positions))
        for part in self._parts():
            part[fresh, :num_positions] = part[handle, :num_positions]
        return fresh

    def num_free(self) -> int:
        return self._slots.num_free()

    def memory(self) -> MemoryUse:
        """What the board's chips would hold together, as planned; not what the emulator takes."""
        chips = self._decode.mesh.num_chips
        return MemoryUse(self._plan.weight_bytes * chips, self._plan.cache_bytes * chips)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """The bytes of state on all chips together, in whole pages."""
        chips = self._decode.mesh.num_chips
        pages = sum(
            cache.num_bytes // cache.num_pages * -(-num_positions // cache.page)
            for cache in self._decode.caches
        )
        return chips * pages

    def close(self) -> None:
        self._caches.clear()

    def _parts(self) -> list[Tensor]:
        return [part for dealt in self._caches.values() for part in dealt.parts().values()]


def emulation_device() -> torch.device:
    """Where boards are emulated: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
