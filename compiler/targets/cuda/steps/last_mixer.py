"""The last mixer of a program, and the values for later instructions."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.steps.plan_readers import (
    covers,
    views_read_by,
    views_written_by,
)
from tilewright.compiler.targets.program.instructions import (
    AddGatedOp,
    AttentionOp,
    BufferView,
    Convolve,
    CrossAttentionOp,
    DeltaRuleOp,
    GatherOp,
    Instruction,
    KernelProgram,
)


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
        reads = views_read_by(instruction)
        views |= dict.fromkeys(v for v in reads if not any(covers(w, v) for w in written))
        written += views_written_by(instruction)
    strides = {(view.buffer, view.pitch) for view in views}
    if not views or len(strides) > len({buffer for buffer, _ in strides}):
        return None
    return LastMixer(program.instructions[start], tuple(views))
