"""Estimates cell times: from rough rates, later from measured cells.

The estimates help users decide whether to wait. They are in no figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tilewright.compiler.devices import BOARDS
from tilewright.evaluate.cases.cases import (
    ACCURACY_CONTEXT,
    ACCURACY_PREFILL,
    CASES,
    NATURAL_PROMPT_LENGTH,
)
from tilewright.evaluate.sweep.journal import SweepState
from tilewright.evaluate.sweep.trial import Trial, TrialKind

_START_SECONDS = 5.0
_COMPILE_SECONDS = 10.0
_STEP_SECONDS = 0.003
_SCORE_SECONDS = 0.004
_BYTES_PER_SECOND = 30e9
_PREFILL_TOKENS_PER_SECOND = 800.0
_UNKNOWN_BYTES = 500_000_000
_EMULATED_PER_SECOND = 1.2e9
_CALIBRATED_BYTES_PER_SECOND = 2e6


def seconds(cell: Trial, *, is_compiled: bool = True) -> float:
    """Estimate a cell's seconds on a small CPU. ``is_compiled``: its program is in the cache."""
    case = CASES[cell.case]
    if cell.calibration and not is_compiled:
        size = cell.weight_bytes or _UNKNOWN_BYTES
        return (
            seconds(replace(cell, calibration=""), is_compiled=False)
            + size / _CALIBRATED_BYTES_PER_SECOND
        )
    if cell.target in BOARDS:  # predicted, or emulated
        multiplies = ACCURACY_CONTEXT * (cell.weight_bytes or _UNKNOWN_BYTES)
        return _START_SECONDS + (multiplies / _EMULATED_PER_SECOND if case.token_accuracy else 5.0)
    step = _STEP_SECONDS + (cell.weight_bytes or _UNKNOWN_BYTES) / _BYTES_PER_SECOND
    prompt = case.batch_size * (case.prompt_length or NATURAL_PROMPT_LENGTH)
    once = prompt / _PREFILL_TOKENS_PER_SECOND + case.max_generated_tokens * step
    found = _START_SECONDS + (case.num_repeats + 0.5) * once
    if case.token_accuracy:
        found += ACCURACY_PREFILL / _PREFILL_TOKENS_PER_SECOND
        found += (ACCURACY_CONTEXT - ACCURACY_PREFILL) * (step + _SCORE_SECONDS)
    return found + (0.0 if is_compiled else _COMPILE_SECONDS)


def total_seconds(cells: Iterable[Trial], *, jobs: int = 1) -> float:
    """Estimate the seconds for new cells. A configuration is compiled once."""
    return sum(guess / _share(cell, jobs) for cell, guess in _guesses(cells))


def remaining_seconds(state: SweepState, *, jobs: int = 1) -> float:
    """Estimate the seconds for open cells, scaled by finished cells with the same kind of trial."""
    guesses = list(_guesses(each.cell for each in state.cells.values()))
    pairs = list(zip(state.cells.values(), guesses, strict=True))
    ratios: dict[TrialKind, list[float]] = {"speed": [], "accuracy": []}
    for each, (cell, guess) in pairs:
        if each.status == "done" and each.seconds:
            ratios[cell.kind].append(each.seconds / guess)
    total = 0.0
    for each, (cell, guess) in pairs:
        if each.is_open:
            known = ratios[cell.kind] or ratios["speed"] or ratios["accuracy"]
            total += guess * (statistics.median(known) if known else 1.0) / _share(cell, jobs)
    return total


def _guesses(cells: Iterable[Trial]) -> Iterator[tuple[Trial, float]]:
    """Yield cells in order, with their estimates."""
    seen: set[tuple[str, ...]] = set()
    for cell in cells:
        is_compiled = cell.is_kept and cell.configuration in seen
        yield cell, seconds(cell, is_compiled=is_compiled)
        seen.add(cell.configuration)


def _share(cell: Trial, jobs: int) -> int:
    return jobs if cell.kind == "accuracy" else 1
