"""Placement for experts, routers and Gated DeltaNet on a mesh with a single axis.

Routers are replicated. A chip has whole experts and whole delta rule heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import WHOLE, ShardedAxis, Sharding, info
from tilewright.compiler.mesh import ROWS, Split, deal, join
from tilewright.compiler.targets.tenstorrent.program.instructions import EXPERTS
from tilewright.errors import CompileError

if TYPE_CHECKING:
    from tilewright.compiler.targets.tenstorrent.program.placements import Placements

aten = torch.ops.aten
_OUT = 1


def matmul_outputs(places: Placements, node: Node) -> Sharding | None:
    """Return the column placement for routers, gates and delta rule inputs, else None.

    Raises:
        CompileError: if the mesh cannot split the heads.
    """
    target: Any = node.target
    assert target is ops.linear.overload
    reader = next(iter(node.users))
    if info(node).tensor_group == "router":
        return WHOLE
    if reader.target is ops.causal_conv1d_step.overload:
        rule = next(iter(reader.users))
        return _columns(places, qkv_split(places, rule))
    if reader.target is ops.gated_delta_rule_step.overload:
        return _columns(places, value_heads(places, reader))
    if info(node).tensor_group == "delta_in" and reader.target is aten.unflatten.int:
        count, size = reader.meta["val"].shape[-2:]
        return _columns(places, _whole_heads(places, node, int(count)).times(int(size)))
    return None


def qkv_split(places: Placements, rule: Node) -> Split:
    """Return the columns by chip: queries, keys, values."""
    args: Any = rule.args
    num_key_heads, key_dim = args[5], args[6]
    keys = _whole_heads(places, rule, num_key_heads).times(key_dim)
    values = value_heads(places, rule).times(int(rule.meta["val"].shape[-1]))
    width = num_key_heads * key_dim
    return join(keys, keys.moved(width), values.moved(2 * width))


def value_heads(places: Placements, rule: Node) -> Split:
    """Return the value heads by chip."""
    return _whole_heads(places, rule, int(rule.meta["val"].shape[-2]))


def assign_conv(places: Placements, node: Node) -> Sharding:
    """Place a convolution and its weight as the input channels."""
    weight, window = node.args[1:3]
    assert isinstance(weight, Node) and isinstance(window, Node)
    result = places.read(node.args[0])
    places.weights[weight] = places.weights[window] = result
    return result


def assign_delta_rule(places: Placements, node: Node) -> Sharding:
    """Place the delta rule's value heads, vectors and state."""
    args: Any = node.args
    heads = value_heads(places, node)
    for vector in (args[3], args[4], args[7]):
        places.weights[vector] = _columns(places, heads)
    return _columns(places, heads.times(int(node.meta["val"].shape[-1])))


def assign_experts(places: Placements, node: Node) -> Sharding:
    """Place whole experts on each chip. The sum over chips is the product.

    Raises:
        CompileError: for a mesh with two axes, or if the experts do not divide evenly.
    """
    weight = node.args[1]
    assert isinstance(weight, Node)
    rows = places.mesh.rows
    if rows == 1:
        return WHOLE
    count = int(weight.meta["val"].shape[0])
    split = _whole(places, node, count, "experts")
    for argument in (weight, *node.args[4:5]):
        assert isinstance(argument, Node)
        places.weights[argument] = Sharding((ShardedAxis(EXPERTS, ROWS, split),))
    return Sharding(partial=ROWS)


def _whole_heads(places: Placements, node: Node, count: int) -> Split:
    return _whole(places, node, count, "heads of the delta rule")


def _whole(places: Placements, node: Node, count: int, noun: str) -> Split:
    mesh = places.mesh
    if mesh.columns > 1 or count % mesh.rows:
        raise CompileError(
            f"{info(node).fqn}: {count} {noun} over {mesh}; allowed on Tenstorrent boards: a mesh "
            f"of one axis, with a number of chips that divides {count}"
        )
    return deal(count, mesh.rows, unit=1)


def _columns(places: Placements, split: Split) -> Sharding:
    return WHOLE if places.mesh.rows == 1 else Sharding((ShardedAxis(_OUT, ROWS, split),))
