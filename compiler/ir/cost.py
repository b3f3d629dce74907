"""Lower bounds for the data movement and computation in a step, from the graph only.

Devices and timing are not considered.
"""

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
"""Name of the group with the communication between ranks."""


@dataclass(frozen=True, slots=True)
class GroupCost:
    """A tensor group's cost in a step.

    Attributes:
        group: Tensor group, ``other`` or ``collective``.
        formats: Weight formats.
        num_weights: Number of weight elements read.
        weight_bytes: Their size in these formats.
        flops: Floating-point operations.
        sent_bytes: Bytes from each rank to the other ranks. Nonzero only for ``collective``.
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
    """Return the cost per tensor group for a step with ``num_tokens`` tokens in a single sequence.

    A weight with several readers counts once. Embeddings count the rows they read. Experts count
    the expected selected expert count. Norms belong to ``other``, even inside a fused matmul.
    """
    sizes = {"T": num_tokens, "N": 1, "N+1": 2, "R": num_logits, "S": 1, "L": context, "V": 0}
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
    """Return the bytes of ``num_elements`` in the collective's link format."""
    wire = next((each for each in node.args if isinstance(each, str)), "fp32")
    return num_elements * get_format(wire).bits / 8


def rows_read(node: Node, recipe: WeightRecipe, num_tokens: int) -> float:
    """Return the number of weight rows (first axis) a node reads for ``num_tokens`` tokens."""
    if info(node).tensor_group == "embedding":
        return num_tokens
    top_k = _experts_of_a_token(node) if len(recipe.shape) > 2 else 0
    count = recipe.shape[0]
    return expected_experts(count, num_tokens, top_k) if top_k else count


def _experts_of_a_token(node: Node) -> int:
    """Return the expert count per token at an expert node, else 0."""
    if node.target is ops.experts.overload:
        return int(node.args[5])  # type: ignore[arg-type]
    for argument in node.all_input_nodes:
        fake = argument.meta.get("val")
        if isinstance(fake, torch.Tensor) and fake.dtype == torch.int64 and fake.dim() == 2:
            return int(fake.shape[1])
    return 0


def _products(node: Node) -> list[str]:
    """Return the tensor groups for the matmuls in an expert block. All have the same size."""
    if node.target is not ops.experts.overload:
        return []
    return [info(weight).tensor_group or "other" for weight in node.args[2:5]]  # type: ignore[arg-type]


def _norm_weight(node: Node) -> object:
    """Return a fused linear's norm weight, or None."""
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
