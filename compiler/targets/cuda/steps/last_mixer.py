"""The last mixer of a program, and the values that later instructions read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tilewright.compiler.targets.program.instructions import (
    AddGatedOp,
    AllReduceAdd,
    AttentionOp,
    BufferView,
    Convolve,
    CrossAttentionOp,
    DeltaRuleOp,
    GatherOp,
    Instruction,
    KernelProgram,
)

_OUTPUTS = ("out", "normed")


@dataclass(frozen=True, slots=True)
class LastMixer:
    """The last instruction that mixes positions. Later instructions compute rows independently.

    Attributes:
        instruction: The instruction.
        views: Values that later instructions read before they write them.
    """

    instruction: Instruction
    views: tuple[BufferView, ...]


def last_mixer_of(program: KernelProgram) -> LastMixer | None:
    """Return the last mixer before the gather of logits.

    None: the program has no gather, or a step cannot select values after the mixer.
    """
    start, gather = -1, -1
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, AttentionOp | DeltaRuleOp | Convolve):
            start = index
        elif isinstance(instruction, GatherOp):
            gather = index
    later = program.instructions[start + 1 : gather + 1]
    if start < 0 or any(isinstance(op, CrossAttentionOp | AddGatedOp) for op in later):
        return None
    views: dict[BufferView, None] = {}
    written: list[BufferView] = []
    for instruction in later:
        reads = _views_read_by(instruction)
        views |= dict.fromkeys(v for v in reads if not any(_covers(w, v) for w in written))
        outputs = (getattr(instruction, name, None) for name in _OUTPUTS)
        written += [view for view in outputs if view is not None]
    strides = {(view.buffer, view.stride or view.width) for view in views}
    if not views or len(strides) > len({buffer for buffer, _ in strides}):
        return None
    return LastMixer(program.instructions[start], tuple(views))


def _views_read_by(instruction: Instruction) -> Iterator[BufferView]:
    """Yield the views that an instruction reads. Sums also read their output."""
    adds = isinstance(instruction, AllReduceAdd) or getattr(instruction, "residual", False)
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name in _OUTPUTS and not (adds and field.name == "out"):
            continue
        for view in value if isinstance(value, tuple) else (value,):
            if isinstance(view, BufferView):
                yield view


def _covers(written: BufferView, view: BufferView) -> bool:
    strides = [v.stride or v.width for v in (written, view)]
    is_same = written.buffer == view.buffer and strides[0] == strides[1]
    end, last = written.first + written.width, view.first + view.width
    return is_same and written.first <= view.first and last <= end
