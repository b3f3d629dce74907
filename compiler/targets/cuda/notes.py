"""Notes of an executable for the user. Excludes notes on memory."""

from __future__ import annotations

from tilewright.compiler.targets.cuda.collectives.all_reduce import PROMPT_WIRE
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.interface.base import CompileOptions


def prompt_wire(options: CompileOptions) -> str | None:
    """Return the format for prompt sums between ranks. None: the format of all sums."""
    is_free = not (options.compute == "exact" or options.is_strict or options.parallel.wire)
    return PROMPT_WIRE if is_free else None


def notes_of(steps: StepRunner, weights: Weights, options: CompileOptions) -> tuple[str, ...]:
    """Return notes on roundings, and on missing kernels."""
    wire = prompt_wire(options)
    notes = steps.copies.said(options.copies)
    notes += weights.roundings(exact=steps.exact)
    if wire and options.parallel.tensor > 1:
        notes += (f"sums of prompts, and of rows beside them, travel in {wire}",)
    if steps.why_slower:
        notes += (f"Triton kernels in place of CUDA C++, slower: {steps.why_slower}",)
    return notes
