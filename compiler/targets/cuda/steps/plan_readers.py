"""Readers of a program's values: the next matmul, the next mixer, and the matmul after a norm.

Also an instruction's views. Excludes kernels.
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


def readers_of(program: KernelProgram) -> dict[int, LinearOp]:
    """Return the next matmul by the identity of attention, or of a gate and up matmul.

    Only this matmul reads the result, and the result has whole tiles.
    """
    found = {}
    for index, (op, reader) in enumerate(pairwise(program.instructions)):
        if not isinstance(reader, LinearOp) or reader.swiglu or not _can_feed(op):
            continue
        is_whole = reader.x.width % TILE_COLUMNS == 0 and reader.norm is None
        later = program.instructions[index + 2 :]
        if is_whole and reader.x == op.out and not _is_read(reader.x, later):
            found[id(op)] = reader
    return found


def norm_readers_of(program: KernelProgram) -> dict[int, LinearOp]:
    """Return the next matmul by the identity of a matmul that adds to the residual.

    The next matmul normalizes this residual, with whole tiles. No decode step runs only the first.
    """
    readers = {}
    for op, reader in pairwise(program.instructions):
        if isinstance(op, LinearOp) and isinstance(reader, LinearOp):
            is_read = op.residual and op.bias is None and op.norm is None and reader.x == op.out
            is_read = is_read and not (reader.is_cross or reader.group.startswith("shared"))
            if is_read and reader.norm is not None and op.out.width % TILE_COLUMNS == 0:
                readers[id(op)] = reader
    return readers


def _can_feed(op: Instruction) -> TypeGuard[AttentionOp | LinearOp]:
    if isinstance(op, LinearOp):
        # Shared experts may run along with experts.
        return op.swiglu and not op.group.startswith("shared")
    return isinstance(op, AttentionOp)


def _is_read(view: BufferView, later: Sequence[Instruction]) -> bool:
    """Return whether instructions read a buffer before they write it."""
    for op in later:
        if any(other.buffer == view.buffer for other in views_read_by(op)):
            return True
        if any(_replaces(written, view) for written in views_written_by(op)):
            return False
    return False


def _replaces(written: BufferView, view: BufferView) -> bool:
    is_other_layout = written.pitch != view.pitch
    return written.buffer == view.buffer and (is_other_layout or covers(written, view))


def covers(written: BufferView, view: BufferView) -> bool:
    """Return whether a write replaces a view, with equal pitches."""
    is_same = written.buffer == view.buffer and written.pitch == view.pitch
    end, last = written.first + written.width, view.first + view.width
    return is_same and written.first <= view.first and last <= end


def views_read_by(op: Instruction) -> Iterator[BufferView]:
    """Yield the views that an instruction reads. Sums also read their output.

    Intermediate results of an instruction are excluded.
    """
    adds = isinstance(op, AllReduceAdd) or getattr(op, "residual", False)
    convolve = op.convolve if isinstance(op, DeltaRuleOp) else None
    if convolve is not None:
        yield from views_read_by(convolve)
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name in _OUTPUTS and not (adds and field.name == "out"):
            continue
        for view in value if isinstance(value, tuple) else (value,):
            if isinstance(view, BufferView) and (convolve is None or view != convolve.out):
                yield view


def views_written_by(op: Instruction) -> Iterator[BufferView]:
    """Yield the views that an instruction writes."""
    for name in _OUTPUTS:
        view = getattr(op, name, None)
        if view is not None:
            yield view


def mixers_behind(program: KernelProgram) -> dict[int, AttentionOp | DeltaRuleOp]:
    """Return attention or linear attention by the identity of the last matmul before it."""
    found, last = {}, None
    for op in program.instructions:
        if isinstance(op, LinearOp):
            last = op
        elif isinstance(op, AttentionOp | DeltaRuleOp) and last is not None:
            found[id(last)] = op
    return found


def norms_before(program: KernelProgram) -> list[tuple[NormOp, LinearOp]]:
    """Return the norms with the next matmul as reader. The matmul writes neither the norm nor the
    norm's x.
    """
    found = []
    for norm, matmul in pairwise(program.instructions):
        if isinstance(norm, NormOp) and isinstance(matmul, LinearOp) and matmul.x == norm.out:
            buffers = {norm.x.buffer, norm.out.buffer, matmul.out.buffer}
            if matmul.norm is None and not matmul.residual and len(buffers) == 3:
                found.append((norm, matmul))
    return found
