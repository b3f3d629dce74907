"""Weights in a lowered graph, as queries for their storage on a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import CONSTANT, WEIGHT, NodeInfo, info, product_info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.interface.base import Target, WeightStorage


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight or constant with its reader.

    Attributes:
        node: The reader.
        recipe: The weight's recipe.
        facts: Metadata of the matmul or lookup. For vectors and constants, their own metadata
            without a tensor group.
        block: Further weights with metadata, if the node runs a whole expert block.
    """

    node: Node
    recipe: WeightRecipe
    facts: NodeInfo
    block: tuple[tuple[WeightRecipe, NodeInfo], ...] = ()

    def storage_by(self, target: Target, compute: str) -> WeightStorage:
        """Return a target's storage for this weight.

        Raises:
            CompileError: The target does not support the weight.
        """
        return target.weight_storage(self.recipe, self.facts, compute=compute, block=self.block)


def weight_uses(graph_module: GraphModule) -> Iterator[WeightUse]:
    """Yield every use of weights and constants in reading order."""
    for node in graph_module.graph.nodes:
        uses = list(_uses_of(node)) if node.op == "call_function" else []
        is_block = node.target is ops.experts.overload
        for use in uses:
            others = [each for each in uses if is_block and each is not use]
            block = tuple((each.recipe, each.facts) for each in others)
            yield dataclasses.replace(use, block=block)


def _uses_of(node: Node) -> Iterator[WeightUse]:
    for argument in node.all_input_nodes:
        facts_of_weight = info(argument)
        if facts_of_weight.role not in (WEIGHT, CONSTANT) or facts_of_weight.recipe is None:
            continue
        if facts_of_weight.role == WEIGHT and len(facts_of_weight.recipe.shape) > 1:
            facts = product_info(node, argument)
        else:
            facts = dataclasses.replace(facts_of_weight, tensor_group=None)
        yield WeightUse(node, facts_of_weight.recipe, facts)
