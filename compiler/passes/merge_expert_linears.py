"""Merges gate and up of every expert, and fuses the swiglu after them."""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.recipe import WeightRecipe, cut
from tilewright.compiler.ir.rewrite import Bindings, CallPattern, Var, emit, rewrite_matches
from tilewright.compiler.passes.runner import PassContext, graph_pass


def _product(weight: str) -> CallPattern:
    return CallPattern(ops.expert_linear.overload, Var("x"), Var(weight), Var("experts"))


_PATTERN = CallPattern(ops.swiglu.overload, _product("gate"), _product("up"))


@graph_pass
def merge_expert_linears(graph_module: GraphModule, ctx: PassContext) -> int:
    """Replace gate, up and swiglu of experts with a fused matmul.

    Each expert's weight has the gate rows above the up rows. Segments are retained. Matmuls with
    different formats or fidelities, or with other readers, are not merged, and a note has the
    reason.
    """

    def build(root: Node, found: Bindings) -> Node | None:
        gate, up = root.all_input_nodes
        reason = _why_apart(gate, up)
        if reason:
            ctx.notes.append(f"not merged: {info(gate).fqn}, {info(up).fqn} ({reason})")
            return None
        name = f"{info(gate).fqn}_{info(up).fqn.rpartition('.')[2]}"
        weight = _merged_input(found["gate"], found["up"], f"{name}.weight")
        args = (found["x"], weight, found["experts"], None, True)
        facts = dataclasses.replace(info(gate), fqn=name)
        return emit(root, ops.fused_expert_linear, args, facts=facts)

    return rewrite_matches(graph_module.graph, _PATTERN, build)


def _why_apart(gate: Node, up: Node) -> str:
    """Return the reason against merging two matmuls, or an empty text."""
    if len(gate.users) > 1 or len(up.users) > 1 or len(gate.args) > 3 or len(up.args) > 3:
        return "read by others too"
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
    found = info(weight).recipe
    assert found is not None
    return found


def _merged_input(gate: Node, up: Node, name: str) -> Node:
    """Return a placeholder for both weights. Dead-code removal erases the old placeholders."""
    with gate.graph.inserting_before(gate):
        merged = gate.graph.placeholder(name.replace(".", "_"))
    fake = gate.meta["val"]
    num_experts, num_rows, num_columns = fake.shape
    merged.meta["val"] = fake.new_empty((num_experts, 2 * num_rows, num_columns))
    first, second = info(gate).recipe, info(up).recipe
    assert first is not None and second is not None
    segments = tuple(
        segment
        for expert in range(num_experts)
        for part in (first, second)
        for segment in cut(part, expert * num_rows, (expert + 1) * num_rows)
    )
    shape = (num_experts, 2 * num_rows, num_columns)
    recipe = dataclasses.replace(first, segments=segments, shape=shape)
    set_info(merged, info(gate), fqn=name, recipe=recipe)
    return merged
