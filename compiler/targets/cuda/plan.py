"""The plan of a lowered graph for the GPU's kernels."""

from __future__ import annotations

import math

from torch.fx import GraphModule

from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS
from tilewright.compiler.targets.program import plan
from tilewright.compiler.targets.program.instructions import Mixer, Needs, Plan

NEEDS = Needs(
    target="cuda",
    others="reference, or cpu",
    row_multiple=TILE_ROWS,
    has_soft_caps=False,
    max_delta_dim=128,  # channels of a key and of a value that the rule's kernels keep in registers
)
"""What its kernels ask of a plan."""


def make_plan(graph_module: GraphModule) -> Plan:
    """The plan of a graph of this target's last stage.

    Raises:
        CompileError: for an operator that no kernel stands for.
    """
    return plan.make_plan(graph_module, NEEDS)


def has_mixers(plan: Plan) -> bool:
    """Whether a plan has experts or linear attention."""
    return any(isinstance(each, Mixer) for each in plan.instructions)


def num_multiplied(plan: Plan) -> int:
    """Weights that a token of a prompt is multiplied with: those of all products but the head."""
    return sum(math.prod(each.weight.shape) for each in plan.products[:-1])
