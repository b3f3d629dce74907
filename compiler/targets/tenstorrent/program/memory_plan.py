"""Memory plan: DRAM per chip and L1 per core. Loads nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tilewright.compiler.devices import BOARDS, get_device
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    L1,
    DeviceProgram,
    Matmul,
    TtValue,
    class_name,
    tile_bytes,
)
from tilewright.compiler.targets.tenstorrent.program.placement import PROMPT_CHUNK
from tilewright.compiler.targets.tenstorrent.program.product_blocks import product_bytes
from tilewright.errors import CompileError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory usage per chip in bytes.

    Attributes:
        weight_bytes, cache_bytes: size in DRAM.
        value_bytes: DRAM for the largest instruction's values.
        l1_bytes: maximum L1 usage per core.
        fullest: instruction with maximum L1 usage.
    """

    weight_bytes: int
    cache_bytes: int
    value_bytes: int
    l1_bytes: int
    fullest: str

    @property
    def dram_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.value_bytes


def plan_memory(program: DeviceProgram) -> MemoryPlan:
    """Return the memory usage per chip."""
    l1_bytes, fullest = 0, ""
    value_bytes = 0
    for instruction in program.instructions:
        values = [
            operand
            for field in dataclasses.fields(instruction)
            if isinstance(operand := getattr(instruction, field.name), TtValue)
        ]
        in_dram = sum(value.num_bytes for value in values if value.memory.buffer != L1)
        value_bytes = max(value_bytes, in_dram)
        if isinstance(instruction, Matmul):
            here = product_bytes(instruction)
        else:
            here = sum(bytes_on_a_core(value) for value in values if value.memory.buffer == L1)
        if here > l1_bytes:
            l1_bytes, fullest = here, f"{class_name(instruction)} of {instruction.fqn}"
    return MemoryPlan(
        weight_bytes=sum(weight.num_bytes for weight in program.weights),
        cache_bytes=sum(cache.num_bytes for cache in program.caches)
        + sum(state.num_bytes for state in program.states),
        value_bytes=value_bytes,
        l1_bytes=l1_bytes,
        fullest=fullest,
    )


def run_memory(prefill: DeviceProgram, decode: DeviceProgram) -> MemoryPlan:
    """Return the memory usage per chip for both steps, with all users' caches.

    A long prompt runs in chunks with ``PROMPT_CHUNK`` tokens.
    """
    usage, prompt = map(plan_memory, (decode, prefill))
    values = prompt.value_bytes * min(prefill.length, PROMPT_CHUNK) // prefill.length
    fullest = max(usage, prompt, key=lambda step: step.l1_bytes)
    return dataclasses.replace(
        usage,
        value_bytes=max(usage.value_bytes, values),
        l1_bytes=fullest.l1_bytes,
        fullest=fullest.fullest,
    )


def check_memory(prefill: DeviceProgram, decode: DeviceProgram) -> MemoryPlan:
    """Check the memory usage of both steps against the board's DRAM and L1, and return it.

    Raises:
        CompileError: Includes the required bytes and fitting changes.
    """
    usage = run_memory(prefill, decode)
    device = get_device(decode.device)
    assert device.dram_bytes is not None and device.l1_bytes is not None
    if usage.dram_bytes > device.dram_bytes:
        raise CompileError(
            f"{usage.dram_bytes / 1e9:.2f} GB a chip of {device.name} ("
            f"{usage.weight_bytes / 1e9:.2f} of weights, {usage.cache_bytes / 1e9:.2f} of caches "
            f"for {decode.batch} x {decode.context} positions) of "
            f"{device.dram_bytes / 1e9:.2f}, exceeded by "
            f"{usage.dram_bytes - device.dram_bytes} bytes; allowed: "
            f"{_what_fits(decode, usage, device.dram_bytes)}"
        )
    if usage.l1_bytes > device.l1_bytes:
        raise CompileError(
            f"{usage.fullest}: {usage.l1_bytes} bytes of L1 per core, limit {device.l1_bytes}; "
            "allowed: a larger mesh, or narrower formats"
        )
    return usage


def _what_fits(program: DeviceProgram, usage: MemoryPlan, limit: int) -> str:
    """Return fitting changes with sizes."""
    changes = []
    of_bf16 = sum(w.num_bytes for w in program.weights if w.format == "bf16" and w.transposed)
    if of_bf16:
        in_bfp8 = usage.dram_bytes - of_bf16 * (1 - tile_bytes("bfp8") / tile_bytes("bf16"))
        if in_bfp8 <= limit:
            changes.append(f"products of bf16 in bfp8 ({in_bfp8 / 1e9:.2f} GB)")
    room = limit - usage.weight_bytes - usage.value_bytes
    if room > 0:
        a_position = usage.cache_bytes / (program.batch * program.context)
        changes.append(f"{int(room / a_position)} positions in all")
    family = get_device(program.device).architecture
    for name in (each for each in BOARDS if get_device(each).architecture == family):
        chips = get_device(name).num_chips
        if chips <= program.mesh.num_chips:
            continue
        share = usage.dram_bytes * program.mesh.num_chips / chips
        if share <= limit:
            changes.append(f"a larger mesh ({name}: about {share / 1e9:.2f} GB a chip)")
            break
    return ", ".join(changes) or "fewer layers, or a smaller model"


def bytes_on_a_core(value: TtValue) -> int:
    """Return the bytes per core. Interleaved values are distributed over all cores."""
    rows, columns = value.tiles
    cores = value.memory.cores or 64
    return -(-rows * columns // cores) * tile_bytes(value.format)
