"""Shards weights and values over a group of ranks, and inserts collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import WHOLE, NodeInfo, ShardedAxis, Sharding, info, set_info
from tilewright.compiler.ir.rewrite import emit
from tilewright.compiler.ir.text import operator_name
from tilewright.compiler.mesh import Split, deal
from tilewright.compiler.passes.runner import PassContext, graph_pass
from tilewright.compiler.passes.sharding.sharding_plan import ShardingPlan, plan_sharding
from tilewright.distributed.parallel import EXPERT, RANKS, TENSOR
from tilewright.errors import CompileError

aten = torch.ops.aten


@graph_pass
def shard(graph_module: GraphModule, ctx: PassContext) -> int:
    """Shard linears over the ranks in ``ctx.parallel``, by heads and by format blocks.

    Insert a collective before an operator's first use of a whole value. Shapes stay the whole
    model's: on the whole graph, a collective is the identity. Values without a rule stay whole, and
    a note reports unsharded linears. A single rank needs no sharding. Return the number of sharded
    weights.

    Raises:
        CompileError: Heads or blocks cannot be divided among the ranks.
    """
    if ctx.parallel.tensor == 1:
        return 0
    shares = plan_sharding(graph_module, ctx.parallel)
    ctx.notes.extend(shares.notes)
    sharder = _Sharder(shares, ctx.parallel.wire or "fp32")
    for node in list(graph_module.graph.nodes):
        sharder.visit(node)
    for node, placement in (sharder.places | sharder.weights).items():
        set_info(node, placement=placement)
    ctx.places.extend(dict.fromkeys(_shard_notes(sharder.weights)))
    return sum(placement != WHOLE for placement in sharder.weights.values())


def _shard_notes(weights: Mapping[Node, Sharding]) -> Iterator[tuple[str, str, str]]:
    """Yield each weight's group, sharded axis and shard sizes."""
    for weight, placement in weights.items():
        group = info(weight).tensor_group
        names = {0: "out", 1: "in"} if weight.meta["val"].dim() == 2 else _EXPERT_AXES
        for each in placement.sharded if group else ():
            sizes = each.split.sizes
            is_even = len(sizes) > 1 and len(set(sizes)) == 1
            shown = f"{len(sizes)} x {sizes[0]}" if is_even else " + ".join(map(str, sizes))
            yield str(group), names[each.axis], shown


_EXPERT_AXES = {0: "experts", 1: "out", 2: "in"}


class _Sharder:
    """Walks a graph from its inputs. ``places`` has value shardings, ``weights`` has weight
    shardings.
    """

    def __init__(self, shares: ShardingPlan, wire: str) -> None:
        self.ranks, self.outputs, self.wire = shares.ranks, shares.outputs, wire
        self.places: dict[Node, Sharding] = {}
        self.weights: dict[Node, Sharding] = {}
        self._whole: dict[Node, Node] = {}

    def visit(self, node: Node) -> None:
        """Assign a sharding to a node. Its operands have theirs already."""
        if node.op == "placeholder":
            self.places[node] = WHOLE
        elif node.op == "call_function":
            self.places[node] = _RULES.get(node.target, _whole)(self, node)
        elif node.op == "output":
            _whole(self, node)

    def hold(self, weight: Any, *sharded: ShardedAxis) -> None:
        """Record a weight's or bias's sharding."""
        if isinstance(weight, Node):
            placement = Sharding(sharded)
            assert self.weights.setdefault(weight, placement) == placement, f"{weight}: two places"

    def place(self, argument: Any) -> Sharding:
        """Return an operand's sharding. Numbers are whole on every rank."""
        return self.places[argument] if isinstance(argument, Node) else WHOLE

    def make_whole(self, node: Node, source: Node) -> None:
        """Replace an operand of ``node`` with the whole value, from an all-reduce or all-gather."""
        placement = self.places[source]
        if placement == WHOLE:
            return
        if source not in self._whole:
            facts = NodeInfo(fqn=info(source).fqn, layer=info(source).layer)
            if placement.partial:
                args: tuple[Any, ...] = (source, self.ranks.count, self.wire)
                whole = emit(node, ops.all_reduce, args, facts=facts)
            else:
                (sharded,) = placement.sharded
                if not sharded.split.is_in_order or sharded.over != RANKS:
                    raise CompileError(
                        f"{info(node).fqn or node.name}: {operator_name(node)} reads a value "
                        f"sharded over {self.ranks.count} ranks; allowed: one device"
                    )
                args = (source, list(sharded.split.sizes), sharded.axis - source.meta["val"].dim())
                whole = emit(node, ops.all_gather, args, facts=facts)
            self._whole[source], self.places[whole] = whole, WHOLE
        node.replace_input_with(source, self._whole[source])


def _whole(sharder: _Sharder, node: Node) -> Sharding:
    """Read whole values and return a whole value."""
    for source in node.all_input_nodes:
        sharder.make_whole(node, source)
    return WHOLE


def _linear(sharder: _Sharder, node: Node) -> Sharding:
    x, weight, *bias = node.args
    assert isinstance(x, Node)
    if sharder.place(x).partial:
        sharder.make_whole(node, x)
    last = node.meta["val"].dim() - 1
    inputs = sharder.place(node.args[0]).along(last)
    if inputs is not None:  # the bias is added once, by rank 0
        sharder.hold(weight, ShardedAxis(1, inputs.over, inputs.split))
        return Sharding(partial=RANKS)
    if node not in sharder.outputs:
        return _whole(sharder, node)
    split = sharder.outputs[node]
    sharder.hold(weight, ShardedAxis(0, RANKS, split))
    for each in bias:
        sharder.hold(each, ShardedAxis(0, RANKS, split))
    return Sharding((ShardedAxis(last, RANKS, split),))


def _expert_linear(sharder: _Sharder, node: Node) -> Sharding:
    """Shard whole experts over the expert axis, and each expert's width over the tensor axis."""
    x, weight, *choice = node.args
    for each in choice:
        if isinstance(each, Node):
            sharder.make_whole(node, each)
    assert isinstance(weight, Node) and isinstance(x, Node)
    last, count = node.meta["val"].dim() - 1, sharder.ranks.size(EXPERT)
    num_experts = int(weight.meta["val"].shape[0])
    by_expert: tuple[ShardedAxis, ...] = ()
    if count > 1:
        split = deal(num_experts, count, unit=1, policy=sharder.ranks.policy_of(EXPERT))
        by_expert = (ShardedAxis(0, EXPERT, split),)
    inputs = sharder.place(x).along(x.meta["val"].dim() - 1)
    if inputs is not None:
        sharder.hold(weight, *by_expert, ShardedAxis(2, TENSOR, inputs.split))
        return Sharding(partial=RANKS)
    sharder.make_whole(node, x)
    if node not in sharder.outputs:
        return WHOLE
    split = sharder.outputs[node]
    sharder.hold(weight, *by_expert, ShardedAxis(1, TENSOR, split))
    return Sharding((ShardedAxis(last, TENSOR, split),))


def _value_by_value(sharder: _Sharder, node: Node) -> Sharding:
    """Keep the operands' common sharding. An operand with a single column may be whole."""
    operands = [each for each in node.args if isinstance(each, Node)]
    for each in operands:
        if sharder.place(each).partial:
            sharder.make_whole(node, each)
    operands = [each for each in node.args if isinstance(each, Node)]
    vectors = [each for each in operands if each.meta["val"].shape[-1:] != (1,)]
    places = {sharder.place(each) for each in vectors}
    if len(places) == 1 and all(
        each in vectors or sharder.place(each) == WHOLE for each in operands
    ):
        return places.pop()
    return _whole(sharder, node)


def _sum(sharder: _Sharder, node: Node) -> Sharding:
    """Keep the sum of two partial values partial."""
    places = [sharder.place(each) for each in node.args[:2]]
    if all(place.partial for place in places):
        return places[0]
    return _value_by_value(sharder, node)


def _product(sharder: _Sharder, node: Node) -> Sharding:
    """Keep the product of a partial and a whole value partial."""
    places = [sharder.place(each) for each in node.args[:2]]
    partial = [place for place in places if place.partial]
    if len(partial) == 1 and WHOLE in places:
        return partial[0]
    return _value_by_value(sharder, node)


def _quotient(sharder: _Sharder, node: Node) -> Sharding:
    is_scaled = sharder.place(node.args[0]).partial and sharder.place(node.args[1]) == WHOLE
    return sharder.place(node.args[0]) if is_scaled else _value_by_value(sharder, node)


def _by_heads(sharder: _Sharder, node: Node) -> Sharding:
    """Keep head shardings for norms and rotations. They need the whole last axis."""
    x = node.args[0]
    assert isinstance(x, Node)
    placement = sharder.place(x)
    if placement.partial or placement.along(x.meta["val"].dim() - 1) is not None:
        sharder.make_whole(node, x)
        return WHOLE
    return placement


def _attention(sharder: _Sharder, node: Node) -> Sharding:
    q, k, v = node.args[:3]
    heads = sharder.place(q).along(1)
    if heads is None or any(sharder.place(each).along(1) is None for each in (k, v)):
        return _whole(sharder, node)
    for sinks in node.args[6:7]:
        sharder.hold(sinks, ShardedAxis(0, heads.over, heads.split))
    return sharder.place(q)


def _causal_conv1d(sharder: _Sharder, node: Node) -> Sharding:
    x, weight = node.args[:2]
    split = sharder.place(x).along(1)
    if split is None:
        return _whole(sharder, node)
    sharder.hold(weight, ShardedAxis(0, split.over, split.split))
    return sharder.place(x)


def _gated_delta_rule(sharder: _Sharder, node: Node) -> Sharding:
    qkv, a, b, *vectors = node.args[:5]
    heads = sharder.place(a).along(1)
    if heads is None or sharder.place(b) != sharder.place(a) or sharder.place(qkv) == WHOLE:
        return _whole(sharder, node)
    for each in vectors:
        sharder.hold(each, ShardedAxis(0, heads.over, heads.split))
    return sharder.place(a)


def _unflatten(sharder: _Sharder, node: Node) -> Sharding:
    """Convert a column sharding to a head sharding."""
    x, axis, sizes = node.args
    assert isinstance(x, Node) and isinstance(sizes, list | tuple)
    last = x.meta["val"].dim() - 1
    sharded = sharder.place(x).along(last)
    if sharded is None or axis not in (-1, last) or len(sizes) != 2:
        return _whole(sharder, node)
    split = sharded.split.in_units(int(node.meta["val"].shape[-1]))
    return Sharding((ShardedAxis(last, sharded.over, split),))


def _flatten(sharder: _Sharder, node: Node) -> Sharding:
    """Convert a head sharding to a column sharding."""
    x = node.args[0]
    assert isinstance(x, Node)
    last = node.meta["val"].dim() - 1
    sharded = sharder.place(x).along(last)
    if sharded is None or x.meta["val"].dim() != last + 2:
        return _whole(sharder, node)
    split: Split = sharded.split.times(int(x.meta["val"].shape[-1]))
    return Sharding((ShardedAxis(last, sharded.over, split),))


_RULES: Mapping[Any, Callable[[_Sharder, Node], Sharding]] = {
    ops.linear.overload: _linear,
    ops.expert_linear.overload: _expert_linear,
    ops.swiglu.overload: _value_by_value,
    ops.gelu.overload: _value_by_value,
    aten.tanh.default: _value_by_value,
    ops.sigmoid_gate.overload: _product,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.add.Tensor: _sum,
    ops.rms_norm.overload: _by_heads,
    ops.rope.overload: _by_heads,
    ops.attention.overload: _attention,
    ops.causal_conv1d.overload: _causal_conv1d,
    ops.gated_delta_rule.overload: _gated_delta_rule,
    aten.unflatten.int: _unflatten,
    aten.flatten.using_ints: _flatten,
}
"""Sharding rule by operator. All other operators read and return whole values."""
