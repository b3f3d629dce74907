"""What a step must move and compute at the least, from the graph alone; no device, no timing."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import CONSTANT, WEIGHT, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.text import dimension_names
from tilewright.compiler.ops import COLLECTIVES, OPERATORS
from tilewright.compiler.ops.moe import expected_experts

COLLECTIVE = "collective"
"""The group of what ranks exchange."""


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One tensor group's share: the weights that are read, their bytes in their formats,
    floating-point operations, and the bytes that a rank sends to the others (``collective``).
    """

    group: str
    formats: tuple[str, ...]
    num_weights: int
    weight_bytes: int
    flops: float
    sent_bytes: float = 0.0


def step_costs(
    graph_module: GraphModule, *, num_tokens: int, context: int, num_logits: int = 1
) -> list[GroupCost]:
    """The cost of one step by tensor group, for ``num_tokens`` tokens of one sequence.

    A weight that several nodes read counts once. An embedding counts the rows it reads, and experts
    those that so many tokens are expected to choose. Norms are ``other``, also where a product
    computes them.
    """
    sizes = {"T": num_tokens, "N": 1, "N+1": 2, "R": num_logits, "S": 1, "L": context}
    named = dimension_names(graph_module.graph)
    flops: dict[str, float] = defaultdict(float)
    sent = 0.0
    recipes: dict[str, dict[WeightRecipe, float]] = defaultdict(dict)
    for node in graph_module.graph.nodes:
        operator = OPERATORS.get(node.target) if node.op == "call_function" else None
        if operator is None:
            continue
        arguments = map_arg(node.args, lambda argument: _concrete(argument, named, sizes))
        group = info(node).tensor_group or "other"
        if node.target in COLLECTIVES:
            group = COLLECTIVE
            sent += _sent_bytes(node, operator.cost(*arguments).elements_sent)
        products = _products(node)
        for each in products or [group]:
            flops[each] += float(operator.cost(*arguments).flops) / max(1, len(products))
        norm_weight = _norm_weight(node)
        for argument in node.all_input_nodes:
            facts = info(argument)
            if facts.role in (WEIGHT, CONSTANT) and facts.recipe is not None:
                rows = rows_read(node, facts.recipe, num_tokens)
                share = "other" if argument is norm_weight else group
                if products:
                    share = facts.tensor_group or "other"
                flops.setdefault(share, 0.0)
                recipes[share][facts.recipe] = rows
    found = [_group_cost(group, recipes[group], flops[group]) for group in flops]
    return [replace(each, sent_bytes=sent) if each.group == COLLECTIVE else each for each in found]


def _sent_bytes(node: Node, num_elements: float) -> float:
    """Bytes of so many elements in the format in which a collective sends them."""
    wire = next((each for each in node.args if isinstance(each, str)), "fp32")
    return num_elements * get_format(wire).bits / 8


def rows_read(node: Node, recipe: WeightRecipe, num_tokens: int) -> float:
    """How many rows (of the first axis) of a weight a node reads in a step of so many tokens."""
    if info(node).tensor_group == "embedding":
        return num_tokens
    top_k = _experts_of_a_token(node) if len(recipe.shape) > 2 else 0
    count = recipe.shape[0]
    return expected_experts(count, num_tokens, top_k) if top_k else count


def _experts_of_a_token(node: Node) -> int:
    """The experts of a token at a node that chooses them or is told them; 0 of other nodes."""
    if node.target is ops.experts.overload:
        return int(node.args[5])  # type: ignore[arg-type]
    for argument in node.all_input_nodes:
        fake = argument.meta.get("val")
        if isinstance(fake, torch.Tensor) and fake.dtype == torch.int64 and fake.dim() == 2:
            return int(fake.shape[1])
    return 0


def _products(node: Node) -> list[str]:
    """The tensor groups of the products of a block of experts, which are equally large."""
    if node.target is not ops.experts.overload:
        return []
    return [info(weight).tensor_group or "other" for weight in node.args[2:5]]  # type: ignore[arg-type]


def _norm_weight(node: Node) -> object:
    """The weight of the norm inside a fused product, if there is one."""
    if node.target is not ops.fused_linear.overload:
        return None
    return ops.FusedArguments.of(node.args).norm_weight


def _group_cost(group: str, recipes: dict[WeightRecipe, float], flops: float) -> GroupCost:
    formats: dict[str, None] = {}
    num_weights = num_bytes = 0
    for recipe, rows in recipes.items():
        assert recipe.format is not None
        share = rows / recipe.shape[0]
        num_weights += round(share * math.prod(recipe.shape))
        num_bytes += round(share * get_format(recipe.format).nbytes(recipe.shape))
        formats[recipe.format] = None
    return GroupCost(group, tuple(formats), num_weights, num_bytes, flops)


def _concrete(node: Node, named: dict[str, str], sizes: dict[str, int]) -> Any:
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return fake
    shape = [s if isinstance(s, int) else sizes[named[str(s)]] for s in fake.shape]
    return torch.empty(shape, dtype=fake.dtype, device="meta")
