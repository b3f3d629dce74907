"""Selects the linears for sharding and their outputs' ranges.

As in Megatron-LM (Shoeybi et al., 2019), a block's first linears are sharded by outputs and its
second linear by inputs. The second linears are known by tensor group. A walk back from them finds
the heads or columns to shard. A head or a format block is never split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import FORMATS, get_format
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.mesh import Split, deal, join, split_heads
from tilewright.distributed.parallel import RANKS, TENSOR, ParallelConfig, RankAxes
from tilewright.errors import CompileError

aten = torch.ops.aten

SECOND = ("wo", "ff2", "shared_ff2", "delta_out", "experts_ff2")
"""Tensor groups of linears with sharded inputs."""

_HEAD = "lm_head"
_SOFT, _ROWS, _HEAD_ROWS = 128, 8, 16
_PIECE = 128

_VALUE_BY_VALUE = {
    *(ops.swiglu.overload, ops.gelu.overload, ops.sigmoid_gate.overload),
    *(aten.mul.Tensor, aten.div.Tensor, aten.tanh.default),
}
_HEADS = {aten.unflatten.int, aten.flatten.using_ints, ops.rope.overload}
_CHANNELS = {*_HEADS, ops.causal_conv1d.overload}
_PRODUCTS = {ops.linear.overload, ops.expert_linear.overload}
_MIXERS = {ops.attention.overload, ops.gated_delta_rule.overload}


@dataclass(slots=True)
class ShardingPlan:
    """Sharding of a graph's linears.

    Attributes:
        ranks: The group of ranks.
        outputs: Output ranges by rank, for linears sharded by outputs.
        notes: Linears without sharding, with the reason.
    """

    ranks: RankAxes
    outputs: dict[Node, Split] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_sharding(graph_module: GraphModule, parallel: ParallelConfig) -> ShardingPlan:
    """Plan the sharding for a group of ranks.

    Raises:
        CompileError: More ranks than query heads, or more ranks than whole format blocks.
    """
    products = find_calls(graph_module.graph, ops.linear, ops.expert_linear)
    shares = ShardingPlan(
        RankAxes(parallel.tensor, _expert_parts(products, parallel), parallel.policy)
    )
    for product in products:
        group = info(product).tensor_group
        if group == _HEAD:
            _deal_head(shares, product)
        elif group in SECOND:
            sources = _sources(product)
            if sources is None or not _deal_between(shares, product, sources):
                shares.notes.append(f"whole on every rank: {info(product).fqn}")
    return shares


def _expert_parts(products: list[Node], parallel: ParallelConfig) -> int:
    """Return the expert group count: the requested number, or an automatic one.

    The automatic number is the smallest with an expert width per rank divisible by `_PIECE`.
    """
    shapes = [
        _weight(each).meta["val"].shape
        for each in products
        if info(each).tensor_group == "experts_ff2"
    ]
    if not shapes:
        return 1
    if parallel.expert is not None:
        return parallel.expert
    num_experts, _, inner = (int(size) for size in shapes[0])
    count = parallel.tensor
    for parts in range(1, count + 1):
        pieces = count // parts
        is_whole = inner % (_PIECE * pieces) == 0 or pieces == 1
        if count % parts == 0 and is_whole and parts <= num_experts:
            return parts
    return 1


def _sources(product: Node) -> list[Node] | None:
    """Return the linears and mixers before a linear, through elementwise and head-wise operators.

    Return None if another operator is between them.
    """
    waiting, found = [product.args[0]], []
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node.target in _PRODUCTS | _MIXERS:
            found.append(node)
        elif node.target in _VALUE_BY_VALUE:
            waiting += [each for each in node.args if isinstance(each, Node)]
        elif node.target in _CHANNELS or _is_norm_of_heads(node):
            waiting.append(node.args[0])
        else:
            return None
    return list(dict.fromkeys(found))


def _is_norm_of_heads(node: Node) -> bool:
    return node.target is ops.rms_norm.overload and node.meta["val"].dim() > 2


def _deal_between(shares: ShardingPlan, second: Node, sources: list[Node]) -> bool:
    """Shard a second linear's sources. Return False without a matching rule."""
    mixers = [each for each in sources if each.target in _MIXERS]
    firsts = [each for each in sources if each.target in _PRODUCTS]
    if any(first in shares.outputs for first in firsts) or len(mixers) > 1:
        return False
    if mixers and mixers[0].target is ops.attention.overload:
        return _deal_attention(shares, mixers[0], second, firsts)
    if mixers:
        return _deal_delta_rule(shares, mixers[0], second, firsts)
    if not firsts or {first.target for first in firsts} != {second.target}:
        return False
    _deal_width(shares, second, firsts)
    return True


def _deal_width(shares: ShardingPlan, second: Node, firsts: list[Node]) -> None:
    """Shard the columns between linears. Gate and up have equal shards."""
    over = TENSOR if second.target is ops.expert_linear.overload else RANKS
    blocks = [_block(first, "out") for first in firsts] + [_block(second, "in")]
    size = int(_weight(second).meta["val"].shape[-1])
    hard = math.lcm(_ROWS, *blocks)
    unit = _soft(size, hard, shares.ranks.size(over))
    split = _shard_size(shares, second, size, unit, over)
    for first in firsts:
        shares.outputs[first] = split


def _deal_head(shares: ShardingPlan, head: Node) -> None:
    size, count = int(head.meta["val"].shape[-1]), shares.ranks.count
    hard = math.lcm(_HEAD_ROWS, _block(head, "out"))
    if -(-size // hard) < count:
        shares.notes.append(
            f"whole on every rank: {info(head).fqn} ({size} rows are fewer than {count} x {hard})"
        )
        return
    unit = _soft(size, hard, count)
    shares.outputs[head] = deal(size, count, unit=unit, policy=shares.ranks.policy)


def _deal_attention(shares: ShardingPlan, attention: Node, second: Node, gates: list[Node]) -> bool:
    behind = [_product_behind(each) for each in attention.args[:3]]
    q, k, v = behind
    if q is None or k is None or v is None:
        return False
    (_, num_heads, head_dim), num_kv_heads = (
        attention.meta["val"].shape,
        attention.args[1].meta["val"].shape[-2],  # type: ignore[union-attr]
    )
    blocks = [_block(each, "out") for each in (q, *gates)] + [_block(second, "in")]
    query_unit = _heads_of(blocks, head_dim)
    kv_unit = _heads_of([_block(each, "out") for each in (k, v)], head_dim)
    try:
        heads = split_heads(
            int(num_heads),
            int(num_kv_heads),
            shares.ranks.count,
            shares.ranks.policy,
            kv_unit=kv_unit,
            query_unit=query_unit,
        )
    except CompileError as error:
        is_of_blocks = "blocks" in str(error)
        what = "key/value heads: " if is_of_blocks else ""
        more = ", or formats with smaller blocks" if max(kv_unit, query_unit) > 1 else ""
        raise CompileError(f"{info(attention).fqn}: {what}{error}{more}") from None
    for product in (q, *gates):
        shares.outputs[product] = heads.queries(head_dim).merged()
    for product in (k, v):
        shares.outputs[product] = heads.keys(head_dim).merged()
    return True


def _deal_delta_rule(shares: ShardingPlan, rule: Node, second: Node, firsts: list[Node]) -> bool:
    """Shard key heads together with their value heads. The reading rule gives the widths of q, k
    and v.
    """
    qkv, a, b = (_product_behind(each) for each in rule.args[:3])
    if qkv is None or a is None or b is None:
        return False
    num_keys, key_dim = rule.args[5:7]
    assert isinstance(num_keys, int) and isinstance(key_dim, int)
    _, num_values, value_dim = rule.meta["val"].shape
    ratio = int(num_values) // num_keys
    wide = ratio * int(value_dim)
    units = [_heads_of([_block(each, "out")], ratio) for each in (a, b)]
    units += [_heads_of([_block(each, "out")], wide) for each in (qkv, *firsts)]
    units += [_heads_of([_block(qkv, "out")], key_dim), _heads_of([_block(second, "in")], wide)]
    keys = _shard_size(shares, rule, num_keys, math.lcm(*units), RANKS, what="key heads")
    queries, values = keys.times(key_dim), keys.times(wide)
    width = num_keys * key_dim
    for product in (a, b):
        shares.outputs[product] = keys.times(ratio)
    for product in firsts:
        shares.outputs[product] = values
    shares.outputs[qkv] = join(queries, queries.moved(width), values.moved(2 * width))
    return True


def _product_behind(argument: object) -> Node | None:
    """Return the linear before a mixer's argument, or None."""
    node = argument
    chain = _CHANNELS
    while isinstance(node, Node) and (node.target in chain or _is_norm_of_heads(node)):
        node = node.args[0]
    is_product = isinstance(node, Node) and node.target is ops.linear.overload
    return node if is_product else None  # type: ignore[return-value]


def _weight(product: Node) -> Node:
    weight = product.args[1]
    assert isinstance(weight, Node)
    return weight


def _block(product: Node, axis: str) -> int:
    """Return the number of ``in`` or ``out`` positions per format block."""
    recipe = info(_weight(product)).recipe
    assert recipe is not None and recipe.format is not None
    return get_format(recipe.format).block if recipe.block_axis == axis else 1


def _heads_of(blocks: Iterable[int], width: int) -> int:
    """Return the smallest head count with whole blocks. A head has ``width`` columns."""
    return math.lcm(*(block // math.gcd(block, int(width)) for block in blocks))


def _soft(size: int, hard: int, count: int) -> int:
    """Return a larger shard unit if it still gives every rank a shard."""
    soft = math.lcm(hard, _SOFT)
    return soft if size // soft >= count else hard


def _shard_size(
    shares: ShardingPlan, node: Node, size: int, unit: int, over: str, what: str = "columns"
) -> Split:
    """Divide a size among ranks. On failure, add the node and the allowed formats to the error."""
    count = shares.ranks.size(over)
    try:
        return deal(size, count, unit=unit, policy=shares.ranks.policy_of(over))
    except CompileError as error:
        is_width = what == "columns"
        blocks = {name: get_format(name).block for name in FORMATS} if is_width else {}
        fitting = [n for n, block in blocks.items() if -(-size // math.lcm(_ROWS, block)) >= count]
        more = f", or formats {', '.join(fitting)}" if fitting else ""
        raise CompileError(f"{info(node).fqn}: {what}: {error}{more}") from None
