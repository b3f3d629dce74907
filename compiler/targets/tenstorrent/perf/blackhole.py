"""Time model for Blackhole boards: documented rates, fitted constants, software generations.

Speeds doubled within a year at equal hardware. The fitted operator time therefore belongs to a
software generation, and a prediction uses the newest. ``python -m bench fit-perf-model`` fits and
checks the constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.compiler.targets.tenstorrent.perf.work import (
    ATTENTION,
    COLLECTIVE,
    MATMUL,
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
SPREAD_BYTES_PER_S = 344e9
"""DRAM rate for interleaved tensors in large packets. Documented."""
L1_BYTES_PER_S = 64 * 64e9 * 1.35
LINK_BYTES_PER_S = 2 * 0.85 * 25e9
"""Two links, one direction, at 85 % line rate. Documented."""
SOFTMAX_CYCLES = 1100
"""Vector unit cycles for a score tile, as on Wormhole. Assumed."""


@dataclass(frozen=True, slots=True)
class Software:
    """A software generation: ``readers`` for each DRAM bank in decode matmuls, and whether decode
    attention splits a head over cores (``splits_heads``).
    """

    readers: int = 1
    splits_heads: bool = True


SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        "vllm_2025_05": Software(),
        "tt_2025_11": Software(),
        "tt_2026_07": Software(),
        "tt_2026_09": Software(readers=2),
        "tp4_2025_07": Software(),
        "tp4_2026_09": Software(readers=2),
        "vllm_2026_08": Software(splits_heads=False),
        "gemma_2026_08": Software(),
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
    ``prompt_op_seconds``: operator start in prefill.
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
    prompt_op_seconds: float


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
    prompt_op_seconds=5e-5,
)
"""Round numbers from which the fit begins."""

# fitted: begin
BLACKHOLE = BlackholeConstants(
    cache_bytes_per_s=2.117e11,
    ring_factor=0.7761,
    vllm_2025_05=4.049e-05,
    tt_2025_11=2.247e-05,
    tt_2026_07=1.118e-05,
    tt_2026_09=1.591e-05,
    tp4_2025_07=1.52e-05,
    tp4_2026_09=5.466e-06,
    vllm_2026_08=1.611e-05,
    gemma_2026_08=5.92e-06,
    qwen36_2026_09=8.892e-06,
    coder_2026=9.379e-06,
    matmul_factor=1.359,
    prompt_op_seconds=3.994e-05,
)
BLACKHOLE_BARS = (0.095, 0.638)
# fitted: end
"""Bars: nine in ten left-out rows are within these shares, for t/s/u and TTFT."""


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
    work: InstructionCost, constants: BlackholeConstants, software: str, *, is_decode: bool
) -> tuple[float, float, float]:
    """Return the seconds for the start, the memory transfer, and the arithmetic."""
    generation = SOFTWARE[software]
    start = getattr(constants, software) if is_decode else constants.prompt_op_seconds
    if work.kind == COLLECTIVE:
        steps = work.ring_steps + work.hops
        return steps * constants.ring_factor * start, work.link_bytes / LINK_BYTES_PER_S, 0.0
    start *= work.starts + work.has_bias
    peak = work.phases * PHASE_CYCLES
    if work.kind == MATMUL:
        cycles = work.products * peak
        if work.is_one_row:
            moved = work.bytes_read / (work.banks * BANK_BYTES_PER_S)
            return start, moved, cycles / generation.readers / CLOCK
        factor = 1.0 if is_decode else constants.matmul_factor
        moved = (work.bytes_read + (not is_decode) * work.activation_bytes) / SPREAD_BYTES_PER_S
        return start, moved, factor * cycles / CLOCK
    if work.kind == ATTENTION:
        tiles = work.softmax_tiles if generation.splits_heads else work.head_tiles
        return start, work.bytes_read / constants.cache_bytes_per_s, tiles * SOFTMAX_CYCLES / CLOCK
    rate = SPREAD_BYTES_PER_S if work.is_spread else L1_BYTES_PER_S
    moved = work.activation_bytes / rate + work.bytes_read / SPREAD_BYTES_PER_S
    return start, moved, 0.0
