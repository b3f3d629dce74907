"""The largest batch for a GPU's memory: ``--max-num-seqs auto``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tilewright.compiler.targets.cuda.memory_budget import check_room, with_passes_that_fit
from tilewright.compiler.targets.cuda.state.pages import pages_of
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram
from tilewright.errors import CompileError

_KEPT_PAGES = 0.98
_RANKS_BATCH = 64


def with_batch_that_fits(
    plan: KernelProgram, options: CompileOptions, device: torch.device
) -> CompileOptions:
    """Return ``options`` with the largest batch for the memory, or unchanged without a range.

    A batch from ``least_batch`` to ``max_batch`` fits if the pool has pages for all contexts, or
    98 % of the pages with ``least_batch``. Ranks must agree but may differ in free memory, so their
    batch depends on the plan only.
    """
    least = options.least_batch
    if least is None or least >= options.max_batch:
        return options
    found = replace(options, max_batch=_batch_that_fits(plan, options, device, least))
    if found.max_batch * (1 + found.max_drafts) <= options.strict_rows:
        return replace(found, is_strict=True)
    return found


def _batch_that_fits(
    plan: KernelProgram, options: CompileOptions, device: torch.device, least: int
) -> int:
    if options.parallel.tensor > 1:
        size = _RANKS_BATCH if plan.sequence_states else options.max_batch
        return max(least, min(size, options.max_batch))
    base = _pages_with(plan, replace(options, max_batch=least), device)
    size = options.max_batch
    while size > least:
        found = replace(options, max_batch=size)
        needed = min(size * pages_of(options.max_context), math.ceil(_KEPT_PAGES * base))
        if base and _pages_with(plan, found, device) >= needed:
            break
        size = max(least, size // 2)
    return size


def _pages_with(plan: KernelProgram, options: CompileOptions, device: torch.device) -> int:
    """Return the pool's pages for these options; 0 if they do not fit."""
    try:
        return check_room(plan, with_passes_that_fit(plan, options, device), device).num_pages
    except CompileError:
        return 0
