"""Placement on a mesh for all values and weights in a graph, before lowering.

A block's two matmuls are sharded as a pair, as in `passes.sharding.shard`. Shards are padded to
equal sizes because all chips run one program. A mesh with two axes shards the residual stream also,
and every matmul over both axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.ir.info import WHOLE, ShardedAxis, Sharding, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.mesh import (
    COLUMNS,
    ROWS,
    HeadSplit,
    IndexRange,
    Mesh,
    Split,
    deal,
    join,
    split_heads,
)
from tilewright.compiler.targets.tenstorrent.program import mixer_placements
from tilewright.compiler.targets.tenstorrent.program.placement import shard_cores
from tilewright.errors import CompileError

aten = torch.ops.aten

# If a core has more tiles of a value, its shard is padded to a multiple of 32 tiles.
_MAX_TILES = 300

IN, OUT = 0, 1
"""Weight axes on a chip. A value's columns are axis ``OUT``."""


def max_tiles_a_core(columns: int) -> int:
    """Return the tiles on a core for a value with up to 32 rows."""
    tiles = -(-columns // TILE)
    return tiles // shard_cores(tiles)


def sharded_columns(over: str, split: Split | None) -> Sharding:
    """Return the placement for columns sharded over a mesh axis, or `WHOLE` without an axis."""
    return Sharding((ShardedAxis(OUT, over, split),)) if over and split is not None else WHOLE


class Placements:
    """Placements for the values and the weights in a graph.

    A matmul with sharded inputs makes partial sums. Lowering appends the collective that adds them.

    Attributes:
        made: Placement of each node's result, possibly with partial sums.
        weights: Placement by weight node and state node. Absent: whole.
    """

    def __init__(self, graph_module: GraphModule, mesh: Mesh) -> None:
        """Assign all placements.

        Raises:
            CompileError: The mesh cannot split the heads.
        """
        self.mesh = mesh
        self.made: dict[Node, Sharding] = {}
        self.weights: dict[Node, Sharding] = {}
        for node in graph_module.graph.nodes:
            if node.op == "call_function":  # an operator without a rule has no instruction either
                rule = _RULES.get(node.target)
                self.made[node] = WHOLE if rule is None else rule(self, node)

    def read(self, argument: Any) -> Sharding:
        """Return a value's placement for its readers, after sums are added and logits gathered."""
        node = as_node(argument)
        if info(node).tensor_group == "lm_head":
            return WHOLE
        return Sharding(self.made[node].sharded)

    def over(self, axis: str, size: int) -> Sharding:
        """Return the placement for ``size`` columns over a mesh axis. `WHOLE` if the axis has one
        chip.
        """
        count = self.mesh.size(axis)
        if count == 1:
            return WHOLE
        split = deal(size, count)
        if max_tiles_a_core(split.size) > _MAX_TILES:  # a larger unit lets the shard use more cores
            split = deal(size, count, unit=TILE * TILE)
        return sharded_columns(axis, split)


def deal_heads(mesh: Mesh, args: ops.RopeAttentionArguments) -> tuple[HeadSplit, int]:
    """Return how the mesh's rows split the attention heads, and the head size."""
    _, num_kv_heads, head_dim = state_of(args).shape
    return split_heads(args.num_heads, num_kv_heads, mesh.rows), head_dim


def state_of(args: ops.RopeAttentionArguments) -> StateSpec:
    """Return an attention's cache specification."""
    state = info(as_node(args.kv_cache)).state
    assert state is not None
    return state


def as_node(argument: Any) -> Node:
    """Return a node's argument, which must be a node."""
    assert isinstance(argument, Node)
    return argument


def recipe_of(argument: Any) -> WeightRecipe:
    """Return the recipe for the weight that a node represents."""
    found = info(as_node(argument)).recipe
    assert found is not None, f"{argument} is no weight"
    return found


def _embedding(places: Placements, node: Node) -> Sharding:
    """Shard the columns: every chip looks up its own residual-stream columns."""
    table = as_node(node.args[1])
    places.weights[table] = found = places.over(COLUMNS, recipe_of(table).shape[1])
    return found


def _like(places: Placements, node: Node) -> Sharding:
    """Return the first operand's placement. A norm's weight gets the same placement."""
    found = places.read(node.args[0])
    if node.target is ops.rms_norm.overload and node.meta["val"].ndim == 2:
        places.weights[as_node(node.args[1])] = found
    return found


def _gate(places: Placements, node: Node) -> Sharding:
    """Return the wider operand's placement. A gate may be the first or the second operand."""
    operands = [each for each in node.args if isinstance(each, Node)]
    return places.read(max(operands, key=lambda each: each.meta["val"].shape[-1]))


def _linear(places: Placements, node: Node) -> Sharding:
    """Place a matmul and its weight.

    The first matmul in a block is sharded over outputs. The second matmul is sharded over inputs.
    If the residual stream is sharded, the second matmul is also sharded over outputs.
    """
    weight = as_node(node.args[1])
    inputs = places.read(node.args[0]).along(OUT)
    is_second = inputs is not None and inputs.over == ROWS
    reader = next(iter(node.users))
    own = mixer_placements.matmul_outputs(places, node)
    if own is not None:
        found = own
    elif reader.target is ops.rope_attention_step.overload:
        found = _merged_heads(places, reader)
    elif reader.target is ops.sigmoid_gate.overload and reader.args[1] is node:
        found = places.read(reader.args[0])  # an attention's gate
    else:
        found = places.over(COLUMNS if is_second else ROWS, recipe_of(weight).shape[0])
    for bias in node.args[2:3]:
        places.weights[as_node(bias)] = _bias(places, bias, inputs, found)
    if inputs is None:
        places.weights[weight] = found
        return found
    places.weights[weight] = Sharding((ShardedAxis(IN, inputs.over, inputs.split), *found.sharded))
    return Sharding(found.sharded, partial=inputs.over)


def _bias(places: Placements, bias: Any, inputs: ShardedAxis | None, columns: Sharding) -> Sharding:
    """Return a bias's placement. After a matmul with partial sums, the first chip has the bias and
    all other chips have zeros.
    """
    if inputs is None or places.mesh.columns > 1:
        return columns
    size = recipe_of(bias).shape[0]
    shares = [(IndexRange(0 if rank == 0 else None, size),) for rank in range(places.mesh.rows)]
    return Sharding((ShardedAxis(OUT, inputs.over, Split(tuple(shares))),))


def _merged_heads(places: Placements, attend: Node) -> Sharding:
    """Return the placement for merged Q, K and V outputs, by heads.

    Raises:
        CompileError: Q, K and V are not merged, or the mesh cannot split the heads.
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
    return sharded_columns(ROWS, split)


def _attention(places: Placements, node: Node) -> Sharding:
    """Shard the query heads as the preceding matmul, and the cache by the same heads."""
    if places.mesh.rows == 1:
        return WHOLE
    args = ops.RopeAttentionArguments.of(node.args)
    heads, head_dim = deal_heads(places.mesh, args)
    places.weights[as_node(args.kv_cache)] = sharded_columns(ROWS, heads.keys(head_dim))
    if args.sinks is not None:
        places.weights[as_node(args.sinks)] = Sharding((ShardedAxis(OUT, ROWS, heads.queries(1)),))
    return sharded_columns(ROWS, heads.queries(head_dim))


_RULES: Mapping[Any, Callable[[Placements, Node], Sharding]] = {
    ops.embedding.overload: _embedding,
    ops.linear.overload: _linear,
    ops.rope_attention_step.overload: _attention,
    ops.rms_norm.overload: _like,
    ops.swiglu.overload: _like,
    ops.clamped_swiglu.overload: _like,
    aten.add.Tensor: _like,
    aten.index_select.default: _like,
    ops.gelu.overload: _like,
    ops.sigmoid_gate.overload: _gate,
    aten.mul.Tensor: _gate,
    aten.div.Tensor: _like,
    aten.tanh.default: _like,
    aten.unflatten.int: _like,
    aten.flatten.using_ints: _like,
    ops.causal_conv1d_step.overload: mixer_placements.assign_conv,
    ops.gated_delta_rule_step.overload: mixer_placements.assign_delta_rule,
    ops.expert_linear.overload: mixer_placements.assign_experts,
}
"""Placement rule by operator."""
