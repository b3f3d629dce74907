"""Attention gets its cache: a state input per layer, and the inputs that place a step in it."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.ir.info import INPUT, STATE, NodeInfo, info
from compiler.ir.rewrite import add_input, emit, fake_input, find_calls, replace
from compiler.ir.state import PER_TOKEN, StateSpec
from compiler.passes.runner import PassContext, graph_pass


@graph_pass
def insert_state(graph_module: GraphModule, ctx: PassContext) -> int:
    """``attention`` becomes ``attention_step``; the new inputs carry their :class:`StateSpec`.

    ``cu_seqlens [N + 1]`` cuts the step's tokens into sequences, ``slots [N]`` says where each
    keeps its state.
    """
    graph = graph_module.graph
    found = find_calls(graph, ops.attention)
    if not found:
        return 0
    positions = next(node for node in graph.nodes if node.target == "positions")
    step_info = NodeInfo(role=INPUT)
    bounds_fake = fake_input(positions, ("num_bounds",), torch.int64)
    cu_seqlens = add_input(graph, "cu_seqlens", bounds_fake, step_info)
    slots_fake = fake_input(positions, ("num_sequences",), torch.int64)
    slots = add_input(graph, "slots", slots_fake, step_info)
    for node in found:
        q, k, v, scale = node.args[:4]
        window = node.args[4] if len(node.args) > 4 else 0
        soft_cap = node.args[5:6]
        assert isinstance(k, Node) and isinstance(window, int)
        cache = _add_cache(graph_module, node, k, window, ctx)
        args = (q, k, v, cache, positions, cu_seqlens, slots, scale, window, *soft_cap)
        replace(node, emit(node, ops.attention_step, args, facts=info(node)))
    return len(found)


def _add_cache(
    graph_module: GraphModule, node: Node, key: Node, window: int, ctx: PassContext
) -> Node:
    facts = info(node)
    num_kv_heads, head_dim = key.meta["val"].shape[-2:]
    wanted = ctx.precision.format("kv_cache", layer=facts.layer, fqn=facts.fqn)
    shape = (2, int(num_kv_heads), int(head_dim))
    name = f"{facts.fqn}.kv"
    spec = StateSpec(name, PER_TOKEN, shape, wanted, shard_axis=1, window=window)
    fake = fake_input(key, ("num_slots", 2, "max_length", *shape[1:]), torch.float32)
    state_info = dataclasses.replace(facts, fqn=name, role=STATE, state=spec, compute=None)
    return add_input(graph_module.graph, name.replace(".", "_"), fake, state_info)
