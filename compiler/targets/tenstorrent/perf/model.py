"""Predicted speed for programs on a board.

A step's time is the sum over its instructions (``estimate.py``) and a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.tenstorrent.perf.blackhole import BLACKHOLE_BARS
from tilewright.compiler.targets.tenstorrent.perf.constants import (
    ERROR_BARS,
    SMALLEST_FITTED,
    Constants,
)
from tilewright.compiler.targets.tenstorrent.perf.estimate import (
    InstructionEstimate,
    estimate,
    is_blackhole,
    step_seconds,
)
from tilewright.compiler.targets.tenstorrent.perf.explain import (
    COST_COLUMNS,
    EXPLAIN_COLUMNS,
    cost_rows,
    explain_rows,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    PREFILL,
    DeviceProgram,
    ExpertMatmul,
    Matmul,
)
from tilewright.compiler.targets.tenstorrent.program.placement import PROMPT_CHUNK

__all__ = [
    "InstructionEstimate",
    "Prediction",
    "estimate",
    "explain_time",
    "predict",
    "step_seconds",
]

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, column names and rows."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted metrics for a run, with relative error bars (see ``ERROR_BARS``).

    The error bars are None for models smaller than all fitted models.

    Attributes:
        ttft_ms: Time to the first token in milliseconds.
        decode_tsu: Decode tokens per second for one user.
    """

    ttft_ms: float
    ttft_error: float | None
    decode_tsu: float
    decode_error: float | None


def predict(
    prefill: DeviceProgram,
    decode: DeviceProgram,
    *,
    num_generated: int,
    num_groups: int = 1,
    constants: Constants | None = None,
) -> Prediction:
    """Predict the time to the first token and the decode speed.

    The prefill program determines the prompt length and the decode program the batch size.

    Args:
        num_generated: Output tokens. The decode speed is the middle token's.
        num_groups: Data-parallel groups on the board.
        constants: None: the board's fitted constants.
    """
    assert (prefill.phase, decode.phase) == (PREFILL, DECODE)
    attended = _attended(prefill, decode, num_generated)
    decode_error, ttft_error = _error_bars(prefill, decode, num_groups)
    return Prediction(
        ttft_ms=1e3 * step_seconds(prefill, constants),
        ttft_error=ttft_error,
        decode_tsu=1 / step_seconds(decode, constants, attended=attended),
        decode_error=decode_error,
    )


def _error_bars(
    prefill: DeviceProgram, decode: DeviceProgram, num_groups: int
) -> tuple[float, float] | tuple[None, None]:
    """Return the decode and prefill error bars: the maximum over the run's categories."""
    products = (each.weight for each in decode.instructions if isinstance(each, Matmul))
    num_weights = sum(weight.rows * weight.columns for weight in products)
    if num_weights * decode.mesh.num_chips < SMALLEST_FITTED:
        return None, None
    if is_blackhole(decode):
        has_rows = not any(isinstance(each, ExpertMatmul) for each in decode.instructions)
        return BLACKHOLE_BARS if has_rows and decode.mesh.columns == 1 else (None, None)
    kinds = ["short"]
    kinds += ["batch"] if decode.batch > 1 else []
    kinds += ["long"] if prefill.length > PROMPT_CHUNK else []
    kinds += ["replicas"] if num_groups > 1 else []
    steps, prompts = zip(*(ERROR_BARS[kind] for kind in kinds), strict=True)
    return max(steps), max(prompts)


def explain_time(
    prefill: DeviceProgram,
    decode: DeviceProgram,
    *,
    num_generated: int | None = None,
    constants: Constants | None = None,
) -> list[Table]:
    """Return tables with instruction times for a decode step and a prompt, and with format costs.

    Args:
        num_generated: Output tokens. None: the cache capacity.
    """
    room = max(1, decode.context - prefill.length)
    attended = _attended(prefill, decode, room if num_generated is None else num_generated)
    where = f"on {decode.device} {decode.mesh}, predicted"
    step = f"decode step of {decode.batch} at {attended:,} positions {where}"
    prompt = f"prompt of {prefill.length:,} tokens {where}"
    return [
        (step, EXPLAIN_COLUMNS, explain_rows(decode, constants, attended=attended)),
        (f"formats of the {step}", COST_COLUMNS, cost_rows(decode, constants, attended=attended)),
        (prompt, EXPLAIN_COLUMNS, explain_rows(prefill, constants)),
    ]


def _attended(prefill: DeviceProgram, decode: DeviceProgram, num_generated: int) -> int:
    """Return the middle decode step's context positions, limited by the cache capacity."""
    return min(decode.context, prefill.length + (num_generated + 1) // 2)
