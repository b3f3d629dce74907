"""The rotary embedding of q and k moves inside attention, which then reads flat projections."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.ir.info import info
from compiler.ir.rewrite import Bindings, Call, Literal, Var, emit, rewrite_matches
from compiler.passes.runner import PassContext, graph_pass

aten = torch.ops.aten


def _heads(name: str) -> Call:
    return Call(aten.unflatten.int, Var(name), -1, Literal(f"{name}_heads"))


def _rotated(name: str) -> Call:
    return Call(ops.rope.overload, _heads(name), Var("positions"), Var("inv_freq"))


_STEP = Call(
    ops.attention_step.overload,
    _rotated("q"),
    _rotated("k"),
    _heads("v"),
    Var("cache"),
    Var("positions"),
    Var("cu_seqlens"),
    Var("slots"),
    Literal("scale"),
    Literal("window"),
)
_PATTERN = Call(aten.flatten.using_ints, _STEP, -2)


@graph_pass
def fuse_rope_attention(graph_module: GraphModule, ctx: PassContext) -> int:
    """q, k and v cut from one merged product are read from it; others are read one by one."""

    def build(root: Node, found: Bindings) -> Node | None:
        step = root.args[0]
        assert isinstance(step, Node)
        num_heads = int(step.meta["val"].shape[-2])
        interleaved = _interleaved(step.args[0])
        if interleaved != _interleaved(step.args[1]):
            return None
        packed = _common_product([found["q"], found["k"], found["v"]])
        first = (packed, None, None) if packed else (found["q"], found["k"], found["v"])
        shared = [found[name] for name in ("cache", "positions", "cu_seqlens", "slots", "inv_freq")]
        args = (*first, *shared, num_heads, found["scale"], found["window"], interleaved)
        return emit(root, ops.rope_attention_step, args, facts=info(step))

    return rewrite_matches(graph_module.graph, _PATTERN, build)


def _interleaved(rope: object) -> bool:
    assert isinstance(rope, Node)
    return bool(rope.args[3]) if len(rope.args) > 3 else False


def _common_product(parts: list[Node]) -> Node | None:
    """The merged product that the parts are the consecutive pieces of, if there is one."""
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
