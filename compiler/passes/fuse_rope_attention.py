"""Fuses attention with the rotary embedding of q and k. The fused op reads flat projections."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    rewrite_matches,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten


def _heads(name: str) -> CallPattern:
    return CallPattern(aten.unflatten.int, Var(name), -1, LiteralPattern(f"{name}_heads"))


def _rotated(name: str, *, normed: bool) -> CallPattern:
    heads = _heads(name)
    if normed:
        heads = CallPattern(
            ops.rms_norm.overload, heads, Var(f"{name}_norm"), LiteralPattern("norm_eps")
        )
    return CallPattern(ops.rope.overload, heads, Var("positions"), Var("inv_freq"))


def _pattern(*, normed: bool) -> CallPattern:
    step = CallPattern(
        ops.attention_step.overload,
        _rotated("q", normed=normed),
        _rotated("k", normed=normed),
        _heads("v"),
        Var("cache"),
        Var("positions"),
        Var("cu_seqlens"),
        Var("slots"),
        LiteralPattern("scale"),
        LiteralPattern("window"),
    )
    return CallPattern(aten.flatten.using_ints, step, -2)


@graph_pass
def fuse_rope_attention(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace attention over rotated heads with ``rope_attention_step``.

    Slices q, k and v of a merged linear are read as a single operand. Head norms for q and k (both
    or none) are also fused.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        step: Any = root.args[0]
        turns = _turn(step.args[0])
        if turns != _turn(step.args[1]):
            return None
        packed = _common_product([found["q"], found["k"], found["v"]])
        q, key, value = (packed, None, None) if packed else (found["q"], found["k"], found["v"])
        args = ops.RopeAttentionArguments(
            q,
            key,
            value,
            kv_cache=found["cache"],
            positions=found["positions"],
            cu_seqlens=found["cu_seqlens"],
            slots=found["slots"],
            inv_freq=found["inv_freq"],
            num_heads=int(step.meta["val"].shape[-2]),
            scale=found["scale"],
            window=found["window"],
            interleaved=turns[0],
            factor=turns[1],
            soft_cap=step.args[9] if len(step.args) > 9 else 0.0,
            q_norm=found.get("q_norm"),
            k_norm=found.get("k_norm"),
            norm_eps=found.get("norm_eps", 0.0),
            sinks=step.args[10] if len(step.args) > 10 else None,
        )
        return emit(root, ops.rope_attention_step, args.given(), facts=info(step))

    graph = graph_module.graph
    return sum(rewrite_matches(graph, _pattern(normed=each), build) for each in (False, True))


def _turn(rope: Any) -> tuple[bool, float]:
    """Return whether pairs are neighbors, and the factor for cosines and sines."""
    more = rope.args[3:]
    return bool(more[0]) if more else False, float(more[1]) if len(more) > 1 else 1.0


def _common_product(parts: list[Node]) -> Node | None:
    """Return the merged linear if the arguments are all its output slices in order, else None."""
    splits = set()
    for index, part in enumerate(parts):
        if part.target is not operator.getitem or part.args[1] != index:
            return None
        splits.add(part.args[0])
    split = splits.pop()
    if splits or not isinstance(split, Node):
        return None
    sizes = split.args[1] if split.target is aten.split_with_sizes.default else ()
    product = split.args[0]
    return product if isinstance(product, Node) and len(sizes) == len(parts) else None  # type: ignore[arg-type]
