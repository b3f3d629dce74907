"""Extracts a rank's program from a sharded graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tilewright.compiler import ops
from tilewright.compiler.ir.info import Sharding, info, set_info
from tilewright.compiler.ir.recipe import take
from tilewright.compiler.ir.rewrite import emit, find_calls
from tilewright.compiler.passes.runner import PassContext, graph_pass
from tilewright.distributed.parallel import EXPERT, RANKS, RankAxes


@graph_pass
def slice_rank(graph_module: GraphModule, ctx: PassContext) -> int:
    """Slice the weights for ``ctx.rank`` and recompute all shapes. Return the number of sliced
    weights.

    Afterwards the graph has no shardings. A single rank needs no slicing.
    """
    if ctx.parallel.tensor == 1:
        return 0
    assert 0 <= ctx.rank < ctx.parallel.tensor, f"there is no rank {ctx.rank}"
    ranks = RankAxes(ctx.parallel.tensor, _expert_parts(graph_module), ctx.parallel.policy)
    count = 0
    for node in list(graph_module.graph.nodes):
        placement = info(node).placement
        if node.op == "placeholder" and placement is not None and placement.sharded:
            _cut(node, placement, ranks, ctx.rank)
            count += 1
        elif node.op == "call_function":
            _make_local(node, ranks, ctx.rank)
            with torch.no_grad():
                fakes = map_arg(node.args, lambda argument: argument.meta["val"])
                node.meta["val"] = node.target(*fakes)  # type: ignore[operator]
    for node in graph_module.graph.nodes:
        set_info(node, placement=None)
    return count


def _expert_parts(graph_module: GraphModule) -> int:
    """Return the expert group count in the graph."""
    for product in find_calls(graph_module.graph, ops.expert_linear):
        placement = info(_node(product.args[1])).placement
        sharded = None if placement is None else placement.along(0)
        if sharded is not None and sharded.over == EXPERT:
            return len(sharded.split.shares)
    return 1


def _cut(node: Node, placement: Sharding, ranks: RankAxes, rank: int) -> None:
    recipe = info(node).recipe
    assert recipe is not None
    kept = {
        sharded.axis: sharded.split.shares[ranks.place(sharded.over, rank)]
        for sharded in placement.sharded
    }
    recipe = take(recipe, kept)
    set_info(node, recipe=recipe)
    node.meta["val"] = node.meta["val"].new_empty(recipe.shape)


def _make_local(node: Node, ranks: RankAxes, rank: int) -> None:
    """Replace the whole model's sizes in a call's arguments."""
    if node.target is ops.linear.overload and len(node.args) > 2:
        placement = info(node).placement
        if placement is not None and placement.partial == RANKS and rank > 0:
            node.args = node.args[:2]  # rank 0 adds the bias
    elif node.target is ops.gated_delta_rule.overload:
        a, num_keys = _node(node.args[1]), node.args[5]
        placement = info(a).placement
        sharded = None if placement is None else placement.along(1)
        if sharded is not None:
            assert isinstance(num_keys, int)
            num_values = sum(sharded.split.sizes)
            local = sharded.split.sizes[rank] * num_keys // num_values
            node.args = (*node.args[:5], local, *node.args[6:])
    elif node.target is torch.ops.aten.unflatten.int:
        x, axis, sizes = node.args
        assert isinstance(sizes, list | tuple)
        node.args = (x, axis, [-1, *sizes[1:]])
    elif node.target is ops.expert_linear.overload:
        _choose_local(node, ranks, rank)


def _choose_local(product: Node, ranks: RankAxes, rank: int) -> None:
    """Map expert indices to this rank's own, and skip experts on other ranks."""
    placement = info(_node(product.args[1])).placement
    sharded = None if placement is None else placement.along(0)
    if sharded is None:
        return
    (run,) = sharded.split.shares[ranks.place(sharded.over, rank)]
    chosen = _node(product.args[2])
    found = [each for each in chosen.users if each.target is ops.local_experts.overload]
    if not found:
        assert chosen.target is operator.getitem
        after = chosen.next
        args: tuple[Any, ...] = (chosen, run.start, run.count)
        found = [emit(after, ops.local_experts, args, facts=info(chosen))]
    product.update_arg(2, found[0])


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument
