"""The weights that a lowered graph reads, each as a target is asked what it holds for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import CONSTANT, WEIGHT, NodeInfo, info, product_info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.interface.base import Holding, Target


@dataclass(frozen=True, slots=True)
class WeightUse:
    """One weight or constant as one node reads it.

    ``facts`` are those of the product or look-up, whose tensor group names the weight's; those of
    the weight itself, without a tensor group, where it is a vector or a constant. ``block``: the
    other weights of a node that runs a whole block of experts, each with its facts.
    """

    node: Node
    recipe: WeightRecipe
    facts: NodeInfo
    block: tuple[tuple[WeightRecipe, NodeInfo], ...] = ()

    def held_by(self, target: Target, compute: str) -> Holding:
        """How a target holds this weight: its kind and bytes.

        Raises:
            CompileError: for a weight that this target cannot hold.
        """
        return target.holding(self.recipe, self.facts, compute=compute, block=self.block)


def weight_uses(graph_module: GraphModule) -> Iterator[WeightUse]:
    """Every use of every weight and constant, in the order in which they are read."""
    for node in graph_module.graph.nodes:
        uses = list(_uses_of(node)) if node.op == "call_function" else []
        is_block = node.target is ops.experts.overload
        for use in uses:
            others = [each for each in uses if is_block and each is not use]
            block = tuple((each.recipe, each.facts) for each in others)
            yield dataclasses.replace(use, block=block)


def _uses_of(node: Node) -> Iterator[WeightUse]:
    for argument in node.all_input_nodes:
        held = info(argument)
        if held.role not in (WEIGHT, CONSTANT) or held.recipe is None:
            continue
        if held.role == WEIGHT and len(held.recipe.shape) > 1:
            facts = product_info(node, argument)
        else:
            facts = dataclasses.replace(held, tensor_group=None)
        yield WeightUse(node, held.recipe, facts)
