"""What lies beside a plan's products: who reads them alone, what mixes positions next, and which
norm is made for whom. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TypeGuard

from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS
from tilewright.compiler.targets.program.instructions import (
    AllReduceAdd,
    AttentionOp,
    BufferView,
    DeltaRuleOp,
    Instruction,
    KernelProgram,
    LinearOp,
    NormOp,
)

_OUTPUTS = ("out", "normed")


def readers_of(plan: KernelProgram) -> dict[int, LinearOp]:
    """Return the next matmul by the identity of attention, or of a gate and up matmul, if only this
    matmul reads the result. The result has whole tiles.
    """
    found = {}
    for index, (each, reader) in enumerate(pairwise(plan.instructions)):
        if not isinstance(reader, LinearOp) or not _can_feed(each):
            continue
        is_whole = reader.x.width % TILE_COLUMNS == 0 and reader.norm is None
        later = plan.instructions[index + 2 :]
        if is_whole and reader.x == each.out and not _is_read(reader.x, later):
            found[id(each)] = reader
    return found


def _can_feed(each: Instruction) -> TypeGuard[AttentionOp | LinearOp]:
    if isinstance(each, LinearOp):
        # Shared experts may run along with experts.
        return each.swiglu and not each.group.startswith("shared")
    return isinstance(each, AttentionOp)


def _is_read(view: BufferView, later: Sequence[Instruction]) -> bool:
    """Return whether instructions read a buffer before they write it."""
    for each in later:
        if any(other.buffer == view.buffer for other in views_read_by(each)):
            return True
        if any(other.buffer == view.buffer for other in views_written_by(each)):
            return False
    return False


def views_read_by(each: Instruction) -> Iterator[BufferView]:
    """Yield the views that an instruction reads. Sums also read their output."""
    adds = isinstance(each, AllReduceAdd) or getattr(each, "residual", False)
    for field in fields(each):
        value = getattr(each, field.name)
        if field.name in _OUTPUTS and not (adds and field.name == "out"):
            continue
        for view in value if isinstance(value, tuple) else (value,):
            if isinstance(view, BufferView):
                yield view


def views_written_by(each: Instruction) -> Iterator[BufferView]:
    """Yield the views that an instruction writes."""
    for name in _OUTPUTS:
        view = getattr(each, name, None)
        if view is not None:
            yield view


def mixers_behind(plan: KernelProgram) -> dict[int, AttentionOp | DeltaRuleOp]:
    """By identity, the last products before attention or linear attention, with that."""
    found, last = {}, None
    for each in plan.instructions:
        if isinstance(each, LinearOp):
            last = each
        elif isinstance(each, AttentionOp | DeltaRuleOp) and last is not None:
            found[id(last)] = each
    return found


def norms_before(plan: KernelProgram) -> list[tuple[NormOp, LinearOp]]:
    """Norms with the product right behind that reads them; what it writes is neither the norm nor
    the norm's x.
    """
    found = []
    for norm, each in pairwise(plan.instructions):
        if isinstance(norm, NormOp) and isinstance(each, LinearOp) and each.x == norm.out:
            buffers = {norm.x.buffer, norm.out.buffer, each.out.buffer}
            if each.norm is None and not each.residual and len(buffers) == 3:
                found.append((norm, each))
    return found
