"""Time for every instruction in a program, from its work and the constants.

``work.py`` has the work and ``constants.py`` has the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tilewright.compiler.devices import BLACKHOLE as BLACKHOLE_CHIP
from tilewright.compiler.devices import get_device
from tilewright.compiler.targets.tenstorrent.perf.blackhole import (
    BLACKHOLE,
    SOFTWARE,
    TRACED,
    blackhole_seconds,
    call_seconds,
    is_host_bound,
    prompt_seconds,
    software_of,
)
from tilewright.compiler.targets.tenstorrent.perf.constants import (
    CLOCK,
    FITTED,
    HOP_SECONDS,
    L1_BYTES_PER_S,
    LINK_BYTES_PER_S,
    PHASE_CYCLES,
    SOFTMAX_CYCLES,
    SPREAD_BYTES_PER_S,
    Constants,
)
from tilewright.compiler.targets.tenstorrent.perf.work import (
    ATTENTION,
    COLLECTIVE,
    MATMUL,
    InstructionCost,
    program_work,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    DeviceProgram,
    TtInstruction,
)

BOUND_MEMORY, BOUND_COMPUTE, BOUND_START = "memory", "compute", "start"
BOUND_LINK, BOUND_ROUTE = "links", "steps"
BOUND_ONCE = "once"


@dataclass(frozen=True, slots=True)
class InstructionEstimate:
    """Time for one instruction in seconds, and its bottleneck (``bound``)."""

    instruction: TtInstruction | None
    work: InstructionCost | None
    seconds: float
    bound: str


def estimate(
    program: DeviceProgram, constants: Constants | None = None, *, attended: int | None = None
) -> tuple[InstructionEstimate, ...]:
    """Return the time for every instruction and, last, a step's constant time.

    The last entry has ``instruction`` None.

    Args:
        constants: None: the board's fitted constants.
        attended: Context positions in a decode step, with its own. None: the cache capacity.
    """
    is_decode = program.phase == DECODE
    work = program_work(program, attended=attended)
    seconds_of = seconds_by_work(program, constants)
    lines = [
        InstructionEstimate(instruction, each, *seconds_of(each))
        for instruction, each in zip(program.instructions, work, strict=True)
    ]
    once = 0.0
    if constants is not None or not is_blackhole(program):
        once = once_seconds(constants or FITTED, is_decode=is_decode)
    elif not is_decode:
        once = call_seconds(BLACKHOLE, SOFTWARE[software_of(program)].prompts, program.batch)
    return (*lines, InstructionEstimate(None, None, once, BOUND_ONCE))


def is_blackhole(program: DeviceProgram) -> bool:
    """Return whether a program's chips are Blackhole."""
    return get_device(program.device).architecture == BLACKHOLE_CHIP


def seconds_by_work(
    program: DeviceProgram, constants: Constants | None = None
) -> Callable[[InstructionCost], tuple[float, str]]:
    """Return a function from work to seconds and bottleneck, for a program's board."""
    is_decode = program.phase == DECODE
    if constants is not None or not is_blackhole(program):
        return partial(work_seconds, constants=constants or FITTED, is_decode=is_decode)
    software = software_of(program)
    if not is_decode:
        return _blackhole_prompt(program, software)

    def on_blackhole(work: InstructionCost) -> tuple[float, str]:
        start, moved, computed = blackhole_seconds(work, BLACKHOLE, software)
        if work.kind == COLLECTIVE:
            return start + moved, BOUND_LINK if moved > start else BOUND_ROUTE
        return _parts(start, moved, computed)

    return on_blackhole


def _blackhole_prompt(
    program: DeviceProgram, software: str
) -> Callable[[InstructionCost], tuple[float, str]]:
    """Return a function from work to seconds and bottleneck. In an untraced prompt, only the slower
    side counts for every instruction: the host or the chips.
    """
    prompts = SOFTWARE[software].prompts
    is_traced = prompts == TRACED
    counts = ((work, 1.0) for work in program_work(program))
    is_host = not is_traced and is_host_bound(counts, BLACKHOLE, prompts)

    def on_blackhole(work: InstructionCost) -> tuple[float, str]:
        start, moved, computed = prompt_seconds(work, BLACKHOLE, prompts, software=software)
        if is_host:
            return start, BOUND_START
        start = start if is_traced else 0.0
        seconds, bound = _parts(start, moved, computed)
        return seconds, BOUND_LINK if work.link_bytes and moved > start else bound

    return on_blackhole


def step_seconds(
    program: DeviceProgram, constants: Constants | None = None, *, attended: int | None = None
) -> float:
    """Return a step's time in seconds: the sum over `estimate`."""
    return sum(line.seconds for line in estimate(program, constants, attended=attended))


def once_seconds(constants: Constants, *, is_decode: bool) -> float:
    """Return a step's constant time in seconds."""
    return constants.step_seconds if is_decode else constants.prefill_seconds


def work_seconds(
    work: InstructionCost, constants: Constants, *, is_decode: bool
) -> tuple[float, str]:
    """Return an instruction's time in seconds, and its bottleneck."""
    if work.kind == COLLECTIVE:
        step = constants.ring_seconds if is_decode else constants.prefill_ring_seconds
        if work.is_two_axes and is_decode:
            step = constants.galaxy_ring_seconds
        route = work.ring_steps * step + work.hops * HOP_SECONDS
        link = work.link_bytes / LINK_BYTES_PER_S
        return route + link, BOUND_LINK if link > route else BOUND_ROUTE
    start = constants.op_seconds if is_decode else constants.prefill_op_seconds
    start += work.hops * HOP_SECONDS
    if work.kind == MATMUL:
        if work.has_bias:
            start += constants.bias_seconds if is_decode else constants.prefill_op_seconds
        return _parts(start, *_matmul(work, constants))
    if work.kind == ATTENTION:
        return _parts(start, *_attention(work, constants, is_decode=is_decode))
    rate = SPREAD_BYTES_PER_S if work.is_spread else L1_BYTES_PER_S
    moved = work.activation_bytes / rate + work.bytes_read / SPREAD_BYTES_PER_S
    return _parts(start, moved, 0.0)


def _matmul(work: InstructionCost, constants: Constants) -> tuple[float, float]:
    peak = work.phases * PHASE_CYCLES
    moved = work.activation_bytes / L1_BYTES_PER_S
    if work.is_one_row:
        cycles = work.products * max(peak, constants.tile_cycles)
        return work.bytes_read / constants.bank_bytes_per_s + moved, cycles / CLOCK
    if work.is_spread:
        moved = work.activation_bytes / SPREAD_BYTES_PER_S
    cycles = work.products * peak * constants.product_factor
    return work.bytes_read / SPREAD_BYTES_PER_S + moved, cycles / CLOCK


def _attention(
    work: InstructionCost, constants: Constants, *, is_decode: bool
) -> tuple[float, float]:
    peak = work.phases * PHASE_CYCLES
    cycles = work.products * (max(peak, constants.tile_cycles) if is_decode else peak)
    cycles += work.softmax_tiles * SOFTMAX_CYCLES
    return work.bytes_read / SPREAD_BYTES_PER_S, cycles / CLOCK


def _parts(start: float, moved: float, computed: float) -> tuple[float, str]:
    """Return the total time and the bottleneck. Transfers overlap computation, but not the
    start.
    """
    busy = max(moved, computed)
    if start > busy:
        return start + busy, BOUND_START
    return start + busy, BOUND_MEMORY if moved >= computed else BOUND_COMPUTE
