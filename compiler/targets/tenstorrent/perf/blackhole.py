"""Time model for Blackhole boards: documented rates, fitted constants, software generations.

Speeds doubled within a year at equal hardware. The fitted operator time therefore belongs to a
software generation, and a prediction uses the newest. ``python -m bench fit-perf-model`` fits and
checks the constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.compiler.targets.tenstorrent.perf.work import (
    ATTENTION,
    COLLECTIVE,
    MATMUL,
    NUM_CORES,
    InstructionCost,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DeviceProgram,
    ExpertMatmul,
    Gated,
    TtDeltaRule,
)

CLOCK = 1.35e9
"""Cycles a second."""
PHASE_CYCLES = 16
BANK_BYTES_PER_S = 0.9 * 64e9
"""DRAM rate per bank in decode matmuls. Documented."""
TILE_BYTES_PER_S = 279e9 / 8
"""DRAM rate per bank in prompt matmuls: tile by tile, for bfp4. Documented."""
COLLECTIVE_SECONDS = 9.5e-6
"""Start of a reduce-scatter or a gather on four chips: half an all-reduce of 8 KB. Documented."""
SPREAD_BYTES_PER_S = 344e9
"""DRAM rate for interleaved tensors in large packets. Documented."""
L1_BYTES_PER_S = 64 * 64e9 * 1.35
LINK_BYTES_PER_S = 2 * 0.85 * 25e9
"""Two links, one direction, at 85 % line rate. Documented."""
SOFTMAX_CYCLES = 1100
"""Vector unit cycles for a score tile, as on Wormhole. Assumed."""


TRACED = "traced_prompt"
"""Prompts that replay a trace. Their operators start as in the decode steps of their generation,
and then take the additional time of this constant. The host dispatches each operator of all other
prompts, concurrently with the chips."""
TRACED_SINCE = "2025-12"
"""First month in which the vendor's demos replay traces of prompts on Blackhole. Documented."""


@dataclass(frozen=True, slots=True)
class Software:
    """A software generation: ``readers`` for each DRAM bank in decode matmuls, and the constant for
    operator starts in prompts (``prompts``). ``slots`` is the number of users in a server's decode
    program, which share the cores of attention. 0: the running users share the cores.
    """

    readers: int = 1
    slots: int = 0
    prompts: str = TRACED


SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        "vllm_2025_05": Software(slots=32),
        "tt_2025_11": Software(prompts="tt_prompt"),
        "tt_2026_07": Software(prompts="tt_prompt"),
        "tt_2026_09": Software(readers=2, prompts="tt_prompt"),
        "tp4_2025_07": Software(),
        "tp4_2026_09": Software(readers=2),
        "vllm_2026_08": Software(slots=16),
        "gemma_2026_08": Software(prompts="gemma_prompt"),
        "qwen36_2026_09": Software(readers=2),
        "coder_2026": Software(),
    }
)
"""Generations by name and month: vLLM servers, tt_transformers on a chip (``tt``) and on four
chips (``tp4``), demos for Gemma 3, Qwen3.6 and Qwen3-Coder (a single row)."""


@dataclass(frozen=True, slots=True)
class BlackholeConstants:
    """Fitted constants, all positive. A generation's field is its operator start in seconds.

    ``cache_bytes_per_s``: read rate for keys and values. ``ring_factor``: operator starts per
    collective step. ``matmul_factor``: prefill matmul cycles divided by peak cycles.
    ``traced_prompt``: operator start in a traced prompt, less the start in a decode step.
    ``tt_prompt``, ``gemma_prompt``: host time for an operator in an untraced prompt.
    ``host_collective``: host time for a collective there. ``prompt_call``: host time for a call
    with untraced prompts, shared by the prompts.
    """

    cache_bytes_per_s: float
    ring_factor: float
    vllm_2025_05: float
    tt_2025_11: float
    tt_2026_07: float
    tt_2026_09: float
    tp4_2025_07: float
    tp4_2026_09: float
    vllm_2026_08: float
    gemma_2026_08: float
    qwen36_2026_09: float
    coder_2026: float
    matmul_factor: float
    traced_prompt: float
    tt_prompt: float
    gemma_prompt: float
    host_collective: float
    prompt_call: float


BLACKHOLE_START = BlackholeConstants(
    cache_bytes_per_s=300e9,
    ring_factor=1.5,
    vllm_2025_05=1e-5,
    tt_2025_11=1e-5,
    tt_2026_07=1e-5,
    tt_2026_09=1e-5,
    tp4_2025_07=1e-5,
    tp4_2026_09=1e-5,
    vllm_2026_08=1e-5,
    gemma_2026_08=1e-5,
    qwen36_2026_09=1e-5,
    coder_2026=1e-5,
    matmul_factor=2.0,
    traced_prompt=3e-5,
    tt_prompt=1e-4,
    gemma_prompt=1e-4,
    host_collective=2e-4,
    prompt_call=1e-2,
)
"""Round numbers from which the fit begins."""

# fitted: begin
BLACKHOLE = BlackholeConstants(
    cache_bytes_per_s=2.122e11,
    ring_factor=0.7757,
    vllm_2025_05=3.653e-05,
    tt_2025_11=2.248e-05,
    tt_2026_07=1.118e-05,
    tt_2026_09=1.592e-05,
    tp4_2025_07=1.52e-05,
    tp4_2026_09=5.469e-06,
    vllm_2026_08=1.611e-05,
    gemma_2026_08=5.921e-06,
    qwen36_2026_09=8.894e-06,
    coder_2026=9.38e-06,
    matmul_factor=1.422,
    traced_prompt=3.029e-05,
    tt_prompt=0.0001005,
    gemma_prompt=4.46e-05,
    host_collective=0.0001993,
    prompt_call=0.02463,
)
BLACKHOLE_BARS = (0.156, 0.120)
# fitted: end
"""Bars: nine in ten rows of left-out models and boards are within these shares, for t/s/u and TTFT.
"""


def software_of(program: DeviceProgram) -> str:
    """Return the newest generation with published rows for this program."""
    kinds = {type(item) for item in program.instructions}
    if TtDeltaRule in kinds:
        return "qwen36_2026_09"
    if ExpertMatmul in kinds:
        return "coder_2026"
    if Gated in kinds:
        return "gemma_2026_08"
    return "tp4_2026_09" if program.mesh.num_chips > 1 else "tt_2026_09"


def blackhole_seconds(
    work: InstructionCost, constants: BlackholeConstants, software: str
) -> tuple[float, float, float]:
    """Return a decode instruction's seconds for the start, the memory transfer, the arithmetic."""
    generation = SOFTWARE[software]
    start = getattr(constants, software)
    if work.kind == COLLECTIVE:
        steps = work.ring_steps + work.hops
        return steps * constants.ring_factor * start, work.link_bytes / LINK_BYTES_PER_S, 0.0
    start *= work.starts + work.has_bias
    if work.kind == ATTENTION:
        tiles = work.softmax_tiles
        if generation.slots:
            tiles = work.score_tiles(max(1, NUM_CORES // generation.slots))
        return start, work.bytes_read / constants.cache_bytes_per_s, tiles * SOFTMAX_CYCLES / CLOCK
    if work.kind != MATMUL:
        return start, _small_seconds(work), 0.0
    cycles = work.products * work.phases * PHASE_CYCLES
    if work.is_one_row:
        moved = work.bytes_read / (work.banks * BANK_BYTES_PER_S)
        return start, moved, cycles / generation.readers / CLOCK
    return start, work.bytes_read / SPREAD_BYTES_PER_S, cycles / CLOCK


def prompt_seconds(
    work: InstructionCost, constants: BlackholeConstants, prompts: str, *, software: str = ""
) -> tuple[float, float, float]:
    """Return a prompt instruction's seconds for the start, the memory transfer, the arithmetic.

    Args:
        prompts: Constant for operator starts. In an untraced prompt, the start is host time.
        software: The generation, for a traced prompt.
    """
    formula = work.kind
    start = getattr(constants, prompts)
    if prompts == TRACED:
        start += getattr(constants, software)
    start *= work.starts + work.has_bias
    if formula == COLLECTIVE:
        link = work.link_bytes / LINK_BYTES_PER_S
        if prompts == TRACED:
            return COLLECTIVE_SECONDS, link, 0.0
        return constants.host_collective, COLLECTIVE_SECONDS + link, 0.0
    if formula == ATTENTION:
        cycles = work.softmax_tiles * SOFTMAX_CYCLES
        return start, work.bytes_read / constants.cache_bytes_per_s, cycles / CLOCK
    if formula != MATMUL:
        return start, _small_seconds(work), 0.0
    moved = work.bytes_read / ((work.banks or 8) * TILE_BYTES_PER_S)
    moved += work.activation_bytes / SPREAD_BYTES_PER_S
    cycles = work.products * work.phases * PHASE_CYCLES
    return start, moved, constants.matmul_factor * cycles / CLOCK


def call_seconds(constants: BlackholeConstants, prompts: str, batch: int) -> float:
    """Return a prompt's share of the host time for its call. Calls with traced prompts have none.

    Args:
        batch: Prompts in the call.
    """
    return 0.0 if prompts == TRACED else constants.prompt_call / batch


def is_host_bound(
    work: Iterable[tuple[InstructionCost, float]], constants: BlackholeConstants, prompts: str
) -> bool:
    """Return whether the host needs longer for an untraced prompt than the chips.

    Args:
        work: Instructions with their number.
    """
    host = device = 0.0
    for instruction, count in work:
        start, *busy = prompt_seconds(instruction, constants, prompts)
        host += count * start
        device += count * max(busy)
    return host > device


def _small_seconds(work: InstructionCost) -> float:
    rate = SPREAD_BYTES_PER_S if work.is_spread else L1_BYTES_PER_S
    return work.activation_bytes / rate + work.bytes_read / SPREAD_BYTES_PER_S
