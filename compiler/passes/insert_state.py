"""Gives explicit state to stateful ops: a state input per op, and inputs with sequences and
slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import INPUT, STATE, NodeInfo, info
from tilewright.compiler.ir.rewrite import add_input, emit, fake_input, find_calls, replace
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.ir.verify import STATEFUL
from tilewright.compiler.passes.runner import PassContext, graph_pass
from tilewright.compiler.precision.names import FOLLOWS, VALUE_CACHE


@graph_pass
def insert_state(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace ``attention`` with ``attention_step``, and other stateful ops with their cached form.

    Each state input has a :class:`StateSpec`. ``cu_seqlens [N + 1]`` splits the step's tokens into
    sequences. ``slots [N]`` contains each sequence's cache slot.
    """
    graph = graph_module.graph
    found = find_calls(graph, *STATEFUL)
    if not found:
        return 0
    positions = next(node for node in graph.nodes if node.target == "positions")
    step_info = NodeInfo(role=INPUT)
    bounds_fake = fake_input(positions, ("num_bounds",), torch.int64)
    cu_seqlens = add_input(graph, "cu_seqlens", bounds_fake, step_info)
    slots_fake = fake_input(positions, ("num_sequences",), torch.int64)
    slots = add_input(graph, "slots", slots_fake, step_info)
    where = positions, cu_seqlens, slots
    for node in found:
        _INSERTERS[node.target](graph_module, node, where, ctx)
    return len(found)


_Where = tuple[Node, Node, Node]


def _attention(graph_module: GraphModule, node: Node, where: _Where, ctx: PassContext) -> None:
    q, k, v, scale = node.args[:4]
    window = node.args[4] if len(node.args) > 4 else 0
    more = node.args[5:7]  # the soft cap and the sinks
    assert isinstance(k, Node) and isinstance(window, int)
    facts = info(node)
    num_kv_heads, head_dim = k.meta["val"].shape[-2:]
    group = facts.tensor_group or "kv_cache"
    wanted = ctx.precision.format(group, layer=facts.layer, fqn=facts.fqn)
    values = wanted
    if group == FOLLOWS[VALUE_CACHE]:
        values = ctx.precision.format(VALUE_CACHE, layer=facts.layer, fqn=facts.fqn)
    shape = (2, int(num_kv_heads), int(head_dim))
    name = f"{facts.fqn}.kv"
    own = "" if values == wanted else values
    spec = StateSpec(name, PER_TOKEN, shape, wanted, window=window, value_format=own)
    cache = _add_state(graph_module, node, spec)
    args = (q, k, v, cache, *where, scale, window, *more)
    replace(node, emit(node, ops.attention_step, args, facts=facts))


def _causal_conv1d(graph_module: GraphModule, node: Node, where: _Where, ctx: PassContext) -> None:
    x, weight, *silu = node.args
    assert isinstance(weight, Node)
    num_channels, _, width = weight.meta["val"].shape
    shape = (int(num_channels), int(width) - 1)
    name = f"{info(node).fqn}.window"
    spec = StateSpec(name, PER_SEQUENCE, shape, "fp32")
    window = _add_state(graph_module, node, spec)
    args = (x, weight, window, *where, *silu)
    replace(node, emit(node, ops.causal_conv1d_step, args, facts=info(node)))


def _gated_delta_rule(
    graph_module: GraphModule, node: Node, where: _Where, ctx: PassContext
) -> None:
    """Insert a delta rule's state in fp32, regardless of the configuration: bfloat16 leads to
    loops.
    """
    key_dim = node.args[-1]
    assert isinstance(key_dim, int)
    num_heads, value_dim = node.meta["val"].shape[-2:]
    shape = (int(num_heads), key_dim, int(value_dim))
    name = f"{info(node).fqn}.memory"
    spec = StateSpec(name, PER_SEQUENCE, shape, "fp32")
    state = _add_state(graph_module, node, spec)
    args = (*node.args, state, *where)
    replace(node, emit(node, ops.gated_delta_rule_step, args, facts=info(node)))


_INSERTERS: dict[Any, Callable[[GraphModule, Node, _Where, PassContext], None]] = {
    ops.attention.overload: _attention,
    ops.causal_conv1d.overload: _causal_conv1d,
    ops.gated_delta_rule.overload: _gated_delta_rule,
}


def _add_state(graph_module: GraphModule, node: Node, spec: StateSpec) -> Node:
    """Add the input for the state of all slots."""
    sizes: tuple[int | str, ...] = ("num_slots", *spec.shape)
    if spec.kind == PER_TOKEN:
        sizes = ("num_slots", 2, "max_length", *spec.shape[1:])
    fake = fake_input(node, sizes, torch.float32)
    facts = dataclasses.replace(info(node), fqn=spec.name, role=STATE, state=spec, compute=None)
    return add_input(graph_module.graph, spec.name.replace(".", "_"), fake, facts)
