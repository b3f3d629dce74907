"""Merges gate and up of every expert, and fuses the swiglu after them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.recipe import WeightRecipe, cut
from tilewright.compiler.ir.rewrite import (
    Bindings,
    CallPattern,
    LiteralPattern,
    Var,
    emit,
    rewrite_matches,
)
from tilewright.compiler.passes.runner import PassContext, graph_pass


def _product(weight: str) -> CallPattern:
    return CallPattern(ops.expert_linear.overload, Var("x"), Var(weight), Var("experts"))


_PATTERNS = (
    CallPattern(ops.swiglu.overload, _product("gate"), _product("up")),
    CallPattern(
        ops.clamped_swiglu.overload,
        _product("gate"),
        _product("up"),
        LiteralPattern("limit"),
        LiteralPattern("alpha"),
    ),
)


@graph_pass
def merge_expert_linears(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace gate, up and swiglu of experts with a fused matmul.

    Each expert's weight has the gate rows above the up rows. Segments are retained. Matmuls with
    different formats or fidelities, or with other readers, are not merged, and a note has the
    reason.
    """

    def build(root: Node, bindings: Bindings) -> Node | None:
        gate, up = root.args[:2]
        assert isinstance(gate, Node) and isinstance(up, Node)
        reason = _why_apart(gate, up)
        if reason:
            ctx.notes.append(f"not merged: {info(gate).fqn}, {info(up).fqn} ({reason})")
            return None
        name = f"{info(gate).fqn}_{info(up).fqn.rpartition('.')[2]}"
        weight = _merged_input(bindings["gate"], bindings["up"], f"{name}.weight")
        args: tuple[Any, ...] = (bindings["x"], weight, bindings["experts"], None, True)
        biases = [_bias(product) for product in (gate, up)]
        if "limit" in bindings or biases[0] is not None:
            bias = None
            if biases[0] is not None and biases[1] is not None:
                bias = _merged_input(biases[0], biases[1], f"{name}.bias")
            limits = {key: bindings[key] for key in ("limit", "alpha") if key in bindings}
            args = ops.FusedExpertArguments(*args)._replace(bias=bias, **limits).arguments()
        facts = dataclasses.replace(info(gate), fqn=name)
        return emit(root, ops.fused_expert_linear, args, facts=facts)

    return sum(rewrite_matches(graph_module.graph, each, build) for each in _PATTERNS)


def _bias(product: Node) -> Node | None:
    bias = ops.FusedExpertArguments.of(product.args).bias
    assert bias is None or isinstance(bias, Node)
    return bias


def _why_apart(gate: Node, up: Node) -> str:
    """Return the reason against merging two matmuls, or an empty text."""
    arguments = [ops.FusedExpertArguments.of(product.args) for product in (gate, up)]
    if len(gate.users) > 1 or len(up.users) > 1 or any(args.weights for args in arguments):
        return "read by others too"
    if len({args.bias is None for args in arguments}) > 1:
        return "only some have a bias"
    weights = [_recipe(each) for each in (gate, up)]
    if weights[0].shape != weights[1].shape or any(each.pad_rows for each in weights):
        return "padded or sharded"
    formats = {(each.format, each.block_axis) for each in weights}
    if len(formats) > 1:
        return "formats " + ", ".join(sorted(str(name) for name, _ in formats))
    name, axis = formats.pop()
    if weights[0].is_stored != weights[1].is_stored:
        return f"{name} as stored, and quantised anew"
    if name is not None and axis != "in" and weights[0].shape[1] % get_format(name).block:
        return "blocks along out would span two of them"
    if info(gate).compute != info(up).compute:
        return "unequal fidelities"
    return ""


def _recipe(product: Node) -> WeightRecipe:
    weight = product.args[1]
    assert isinstance(weight, Node)
    bindings = info(weight).recipe
    assert bindings is not None
    return bindings


def _merged_input(gate: Node, up: Node, name: str) -> Node:
    """Return a placeholder for both weights. Dead-code removal erases the old placeholders."""
    with gate.graph.inserting_before(gate):
        merged = gate.graph.placeholder(name.replace(".", "_"))
    fake = gate.meta["val"]
    num_experts, num_rows, *columns = fake.shape
    shape = (num_experts, 2 * num_rows, *columns)
    merged.meta["val"] = fake.new_empty(shape)
    first, second = info(gate).recipe, info(up).recipe
    assert first is not None and second is not None
    segments = tuple(
        segment
        for expert in range(num_experts)
        for part in (first, second)
        for segment in cut(part, expert * num_rows, (expert + 1) * num_rows)
    )
    recipe = dataclasses.replace(first, segments=segments, shape=shape)
    set_info(merged, info(gate), fqn=name, recipe=recipe)
    return merged
