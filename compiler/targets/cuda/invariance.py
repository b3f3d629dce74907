"""Batch invariance: the conditions under which a row's bits depend on its request only."""

from __future__ import annotations

import os

import torch

from tilewright.compiler.targets.cuda.lowering import has_mixers
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram

_WITHHELD = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
"""cuBLAS reads these variables at its first use in a process."""


def can_promise(plan: KernelProgram, options: CompileOptions) -> bool:
    """Return whether strict steps are requested and the plan's kernels can run them."""
    return options.max_strict_rows > 0 and options.compute != "exact" and not has_mixers(plan)


def withhold_workspace() -> None:
    """Disable the workspace of cuBLAS, which then never splits sums over columns.

    With a workspace, the split depends on the number of rows. Without, a row had equal bits in 1 to
    8,192 rows on an H200. No effect after the first use of the GPU in a process.
    """
    if not torch.cuda.is_initialized():
        os.environ.update(_WITHHELD)


def invariant_of(plan: KernelProgram, options: CompileOptions, has_cpp: bool) -> str:
    """Return `Capabilities.invariant`: ``rows`` if strict steps are batch-invariant, else ``none``.

    `Capabilities.invariant_rows` limits ``rows`` to small steps if ``options.is_strict`` is false.
    """
    is_withheld = all(os.environ.get(name) == value for name, value in _WITHHELD.items())
    if can_promise(plan, options) and is_withheld and has_cpp:
        return "rows"
    return "none"
