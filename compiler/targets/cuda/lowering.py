"""Kernel programs of lowered graphs, for GPUs."""

from __future__ import annotations

import math

from torch.fx import GraphModule

from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS
from tilewright.compiler.targets.program import lowering
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    KernelProgram,
    Mixer,
    Needs,
)

NEEDS = Needs(
    target="cuda",
    others="reference, or cpu",
    row_multiple=TILE_ROWS,
    has_soft_caps=False,
    max_delta_dim=128,  # channels of a key or value in registers
    has_cross_layers=True,
)
"""Requirements of the CUDA kernels for a kernel program."""


_ATTENTION_RATE = 0.28
"""Operation rate in prompt attention over pages, relative to matmuls. Measured for 8B on an H200:
64,000 tokens take 7.8 s, and 1,024 tokens take 24 ms.
"""


def lower_to_program(graph_module: GraphModule) -> KernelProgram:
    """Return the kernel program for a graph after this target's last stage.

    Raises:
        CompileError: An operator has no kernel.
    """
    return lowering.lower_to_program(graph_module, NEEDS)


def has_mixers(program: KernelProgram) -> bool:
    """Return whether a program has experts or linear attention."""
    return any(isinstance(each, Mixer) for each in program.instructions)


def num_multiplied(program: KernelProgram) -> int:
    """Return the number of weights multiplied per text token, without the output head."""
    own = (linear for linear in program.products[:-1] if not linear.is_cross)
    return sum(math.prod(linear.weight.shape) for linear in own)


def far_of(program: KernelProgram) -> int:
    """Return the positions before a token for which attention takes as long as all matmuls.

    Return 0 for models with experts or linear attention.
    """
    attends = [each for each in program.instructions if isinstance(each, AttentionOp)]
    if has_mixers(program) or not attends or any(each.window for each in attends):
        return 0
    a_position = sum(2 * each.num_heads * each.state.shape[-1] for each in attends)
    return max(1, int(_ATTENTION_RATE * num_multiplied(program) / a_position))
