"""What a step must move and compute at the least, from the graph alone; no device, no timing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from compiler import ops
from compiler.formats import get_format
from compiler.ir.info import CONSTANT, WEIGHT, info
from compiler.ir.recipe import WeightRecipe
from compiler.ir.text import dimension_names
from compiler.ops import OPERATORS


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One tensor group's share: weight bytes in their formats, and floating-point operations."""

    group: str
    formats: tuple[str, ...]
    num_weights: int
    weight_bytes: int
    flops: float


def step_costs(
    graph_module: GraphModule, *, num_tokens: int, context: int, num_logits: int = 1
) -> list[GroupCost]:
    """The cost of one step by tensor group, for ``num_tokens`` tokens of one sequence.

    A weight that several nodes read counts once. An embedding counts the rows it reads. Norms are
    ``other``, also where a product computes them.
    """
    sizes = {"T": num_tokens, "N": 1, "N+1": 2, "R": num_logits, "S": 1, "L": context}
    named = dimension_names(graph_module.graph)
    flops: dict[str, float] = defaultdict(float)
    recipes: dict[str, dict[WeightRecipe, int]] = defaultdict(dict)
    for node in graph_module.graph.nodes:
        operator = OPERATORS.get(node.target) if node.op == "call_function" else None
        if operator is None:
            continue
        arguments = map_arg(node.args, lambda argument: _concrete(argument, named, sizes))
        group = info(node).tensor_group or "other"
        flops[group] += float(operator.cost(*arguments).flops)
        norm_weight = _norm_weight(node)
        for argument in node.all_input_nodes:
            facts = info(argument)
            if facts.role in (WEIGHT, CONSTANT) and facts.recipe is not None:
                rows = num_tokens if group == "embedding" else facts.recipe.shape[0]
                share = "other" if argument is norm_weight else group
                flops.setdefault(share, 0.0)
                recipes[share][facts.recipe] = rows
    return [_group_cost(group, recipes[group], flops[group]) for group in flops]


def _norm_weight(node: Node) -> object:
    """The weight of the norm inside a fused product, if there is one."""
    if node.target is not ops.fused_linear.overload:
        return None
    return ops.FusedArguments.of(node.args).norm_weight


def _group_cost(group: str, recipes: dict[WeightRecipe, int], flops: float) -> GroupCost:
    formats: dict[str, None] = {}
    num_weights = num_bytes = 0
    for recipe, rows in recipes.items():
        assert recipe.format is not None
        shape = (rows, *recipe.shape[1:])
        num_weights += torch.Size(shape).numel()
        num_bytes += get_format(recipe.format).nbytes(shape)
        formats[recipe.format] = None
    return GroupCost(group, tuple(formats), num_weights, num_bytes, flops)


def _concrete(node: Node, named: dict[str, str], sizes: dict[str, int]) -> Any:
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return fake
    shape = [s if isinstance(s, int) else sizes[named[str(s)]] for s in fake.shape]
    return torch.empty(shape, dtype=fake.dtype, device="meta")
