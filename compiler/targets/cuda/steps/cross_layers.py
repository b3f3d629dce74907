"""Cross-attention layers of a program. Steps without images skip them."""

from __future__ import annotations

from itertools import pairwise

from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import cross_attend
from tilewright.compiler.targets.cuda.kernels.elementwise.add_gated import add_gated
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import (
    AddGatedOp,
    Cross,
    CrossAttentionOp,
    Instruction,
    KernelProgram,
    LinearOp,
    NormOp,
    SwiGLUOp,
)


def cross_instructions(program: KernelProgram) -> frozenset[int]:
    """Return the cross-attention layer instructions, by identity."""
    own = set()
    for instruction, reader in pairwise(program.instructions):
        if _is_cross(instruction) or _is_cross_input(instruction, reader):
            own.add(id(instruction))
    return frozenset(own)


def _is_cross_input(instruction: Instruction, reader: Instruction) -> bool:
    return (
        isinstance(instruction, NormOp | SwiGLUOp)
        and isinstance(reader, LinearOp)
        and reader.is_cross
        and reader.x == instruction.out
    )


def _is_cross(instruction: Instruction) -> bool:
    is_matmul = isinstance(instruction, LinearOp) and instruction.is_cross
    return is_matmul or isinstance(instruction, CrossAttentionOp | AddGatedOp)


class CrossLayers:
    """Attention to image tiles, and gated sums."""

    def __init__(self, program: KernelProgram, weights: Weights) -> None:
        self._weights = weights
        self._all, own = program.instructions, cross_instructions(program)
        self._of_text = tuple(op for op in program.instructions if id(op) not in own)

    def instructions_of(self, rows: TokenBatch) -> tuple[Instruction, ...]:
        """Return a step's instructions: all if it has images."""
        return self._of_text if rows.tiles is None else self._all

    def run(self, instruction: Cross, step: Buffers, rows: TokenBatch, *, decodes: bool) -> None:
        """Run an instruction of a step with images."""
        tiles, out = rows.tiles, step.view(instruction.out)
        assert tiles is not None, "a step without images"
        if isinstance(instruction, AddGatedOp):
            gate = self._weights.constant(instruction.gate)
            add_gated(out, step.view(instruction.x), gate, tiles.visible)
            return
        cross_attend(
            out,
            step.view(instruction.q),
            tiles,
            self._weights.constant(instruction.norm),
            eps=instruction.eps,
            num_kv_heads=instruction.num_kv_heads,
            first=instruction.first,
            scale=instruction.scale,
            decodes=decodes,
        )
