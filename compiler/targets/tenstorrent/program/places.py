"""Where every value and weight of a graph lies on a mesh of chips, before anything is lowered.

Products are dealt in pairs, as in `passes.sharding.shard`, but over padded shares of
equal size, for all chips run one program; on a mesh of two axes the residual stream is dealt as
well, and every product over both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.ir.info import WHOLE, Dealt, Placement, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.mesh import (
    COLUMNS,
    ROWS,
    HeadSplit,
    Mesh,
    Split,
    deal,
    join,
    split_heads,
)
from tilewright.compiler.targets.tenstorrent.program import mixer_places
from tilewright.compiler.targets.tenstorrent.program.placement import shard_cores
from tilewright.errors import CompileError

aten = torch.ops.aten

# Tiles of a value on a core above which a share is padded to a multiple of 32 tiles.
_MAX_TILES = 300

IN, OUT = 0, 1
"""Axes of a weight as chips hold it; a value's columns are its axis ``OUT``."""


def max_tiles_a_core(columns: int) -> int:
    """Return the tiles on a core of a value of one row of tiles."""
    tiles = -(-columns // TILE)
    return tiles // shard_cores(tiles)


def columns_dealt(over: str, split: Split | None) -> Placement:
    """Columns that lie so; whole without an axis."""
    return Placement((Dealt(OUT, over, split),)) if over and split is not None else WHOLE


class Places:
    """The places of a graph's values, as nodes make them and as others read them, and of weights.

    A product whose inputs are dealt makes partial values; the exchange that others read behind it
    is the lowering's.
    """

    def __init__(self, graph_module: GraphModule, mesh: Mesh) -> None:
        """Raises CompileError for heads the mesh cannot split."""
        self.mesh = mesh
        self.made: dict[Node, Placement] = {}
        self.weights: dict[Node, Placement] = {}
        for node in graph_module.graph.nodes:
            if node.op == "call_function":  # an operator without a rule has no instruction either
                rule = _RULES.get(node.target)
                self.made[node] = WHOLE if rule is None else rule(self, node)

    def read(self, argument: Any) -> Placement:
        """Where a value lies for those that read it: sums are added, and logits gathered."""
        node = as_node(argument)
        if info(node).tensor_group == "lm_head":
            return WHOLE
        return Placement(self.made[node].dealt)

    def over(self, axis: str, size: int) -> Placement:
        """``size`` columns over a mesh axis; whole where it has one chip."""
        count = self.mesh.size(axis)
        if count == 1:
            return WHOLE
        split = deal(size, count)
        if max_tiles_a_core(split.size) > _MAX_TILES:  # its cores are too busy: pad the share
            split = deal(size, count, unit=TILE * TILE)
        return columns_dealt(axis, split)


def deal_heads(mesh: Mesh, args: ops.RopeAttentionArguments) -> tuple[HeadSplit, int]:
    """How an attention's heads are dealt over the mesh's rows; and their size."""
    _, num_kv_heads, head_dim = state_of(args).shape
    return split_heads(args.num_heads, num_kv_heads, mesh.rows), head_dim


def state_of(args: ops.RopeAttentionArguments) -> StateSpec:
    """What an attention's cache is."""
    state = info(as_node(args.kv_cache)).state
    assert state is not None
    return state


def as_node(argument: Any) -> Node:
    """An argument of a node that is one itself."""
    assert isinstance(argument, Node)
    return argument


def recipe_of(argument: Any) -> WeightRecipe:
    """How the weight that a node stands for is loaded."""
    found = info(as_node(argument)).recipe
    assert found is not None, f"{argument} is no weight"
    return found


def _embedding(places: Places, node: Node) -> Placement:
    """Every chip looks up its own columns of the stream."""
    table = as_node(node.args[1])
    places.weights[table] = found = places.over(COLUMNS, recipe_of(table).shape[1])
    return found


def _like(places: Places, node: Node) -> Placement:
    """Place a value as what it reads first; a norm's weight lies as its columns do."""
    found = places.read(node.args[0])
    if node.target is ops.rms_norm.overload and node.meta["val"].ndim == 2:
        places.weights[as_node(node.args[1])] = found
    return found


def _gate(places: Places, node: Node) -> Placement:
    """Place a product of a value and its gate, either of which comes first."""
    operands = [each for each in node.args if isinstance(each, Node)]
    return places.read(max(operands, key=lambda each: each.meta["val"].shape[-1]))


def _linear(places: Places, node: Node) -> Placement:
    """The first product of a block over its outputs, the second over its inputs and, where the
    stream is dealt, its outputs.
    """
    weight = as_node(node.args[1])
    inputs = places.read(node.args[0]).along(OUT)
    is_second = inputs is not None and inputs.over == ROWS
    reader = next(iter(node.users))
    own = mixer_places.matmul_outputs(places, node)
    if own is not None:
        found = own
    elif reader.target is ops.rope_attention_step.overload:
        found = _merged_heads(places, reader)
    elif reader.target is ops.sigmoid_gate.overload and reader.args[1] is node:
        found = places.read(reader.args[0])  # the gate of an attention
    else:
        found = places.over(COLUMNS if is_second else ROWS, recipe_of(weight).shape[0])
    for bias in node.args[2:3]:
        places.weights[as_node(bias)] = found
    if inputs is None:
        places.weights[weight] = found
        return found
    places.weights[weight] = Placement((Dealt(IN, inputs.over, inputs.split), *found.dealt))
    return Placement(found.dealt, partial=inputs.over)


def _merged_heads(places: Places, attend: Node) -> Placement:
    """The outputs of the product that an attention reads: Q, K and V head by head.

    Raises:
        CompileError: for products that were not merged, or heads the mesh cannot split.
    """
    args = ops.RopeAttentionArguments.of(attend.args)
    if args.key is not None:
        raise CompileError(
            f"{info(as_node(args.q)).fqn}: q, k and v are products of unequal formats or "
            "fidelities; allowed on Tenstorrent boards: one setting for the three"
        )
    if places.mesh.rows == 1:
        return WHOLE
    heads, head_dim = deal_heads(places.mesh, args)
    _, num_kv_heads, _ = state_of(args).shape
    width, kv_width = args.num_heads * head_dim, num_kv_heads * head_dim
    split = join(
        heads.queries(head_dim),
        heads.keys(head_dim, first=width),
        heads.keys(head_dim, first=width + kv_width),
    )
    return columns_dealt(ROWS, split)


def _attention(places: Places, node: Node) -> Placement:
    """Query heads, as the product's are, and the cache's heads with them."""
    if places.mesh.rows == 1:
        return WHOLE
    args = ops.RopeAttentionArguments.of(node.args)
    heads, head_dim = deal_heads(places.mesh, args)
    places.weights[as_node(args.kv_cache)] = columns_dealt(ROWS, heads.keys(head_dim))
    return columns_dealt(ROWS, heads.queries(head_dim))


_RULES: Mapping[Any, Callable[[Places, Node], Placement]] = {
    ops.embedding.overload: _embedding,
    ops.linear.overload: _linear,
    ops.rope_attention_step.overload: _attention,
    ops.rms_norm.overload: _like,
    ops.swiglu.overload: _like,
    aten.add.Tensor: _like,
    aten.index_select.default: _like,
    ops.gelu.overload: _like,
    ops.sigmoid_gate.overload: _gate,
    aten.mul.Tensor: _gate,
    aten.div.Tensor: _like,
    aten.tanh.default: _like,
    aten.unflatten.int: _like,
    aten.flatten.using_ints: _like,
    ops.causal_conv1d_step.overload: mixer_places.assign_conv,
    ops.gated_delta_rule_step.overload: mixer_places.assign_delta_rule,
    ops.expert_linear.overload: mixer_places.assign_experts,
}
"""How each operator's result lies."""
