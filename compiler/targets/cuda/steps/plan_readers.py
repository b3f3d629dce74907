"""What lies beside a plan's products: who reads them alone, what mixes positions next, and which
norm is made for whom. Knows no kernels.
"""

from __future__ import annotations

from itertools import pairwise

from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    DeltaRuleOp,
    KernelProgram,
    LinearOp,
    NormOp,
)


def readers_of(plan: KernelProgram) -> dict[int, LinearOp]:
    """By identity, products of gate and up in whole tiles with the product behind that reads them;
    nothing else does, for what is behind writes the buffer again first.
    """
    found = {}
    for each, reader in pairwise(plan.instructions):
        if not isinstance(each, LinearOp) or not isinstance(reader, LinearOp):
            continue
        if each.swiglu and not each.group.startswith("shared"):  # those may run along with experts
            width = each.weight.shape[0] // 2
            if reader.x == each.out and reader.norm is None and width % TILE_COLUMNS == 0:
                found[id(each)] = reader
    return found


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
