"""What makes a row's bits depend on its request alone, and whether they do."""

from __future__ import annotations

import os

import torch

from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda.capture import has_mixers
from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.kernels import native
from tilewright.compiler.targets.cuda.weights import Weights, product_of
from tilewright.compiler.targets.program.instructions import Linear, Plan

_WITHHELD = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
"""Read when the library is first used in a process."""


def withhold_workspace() -> None:
    """Let the library's products have no workspace: with one, it splits sums over columns at some
    numbers of rows and not at others. Without, a row has the same bits in 1 to 8,192 rows, as
    measured on an H200; it takes effect in a process that has not used the GPU yet.
    """
    if not torch.cuda.is_initialized():
        os.environ.update(_WITHHELD)


def invariant_of(
    plan: Plan, weights: Weights, options: CompileOptions, device: torch.device
) -> str:
    """What `Capabilities.invariant` says: ``rows`` where strict steps keep that promise for as many
    sequences as there may be, which they do while every product of a decode step is our own.
    """
    if not options.is_strict or options.compute == "exact" or has_mixers(plan):
        return "none"
    if native.why_not(device) or any(os.environ.get(name) != at for name, at in _WITHHELD.items()):
        return "none"
    most = min(native.most_tokens(held) for held in _products(plan, weights))
    return "rows" if options.max_batch <= most else "none"


def _products(plan: Plan, weights: Weights) -> list[HeldWeight]:
    found = [each for each in plan.instructions if isinstance(each, Linear)]
    return [weights.held(product_of(each)) for each in found]
