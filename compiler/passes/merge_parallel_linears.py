"""Merges linears with the same input and tensor group (q|k|v, gate|up)."""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.recipe import WeightRecipe, concatenate
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass


@graph_pass
def merge_parallel_linears(graph_module: GraphModule, ctx: PassContext) -> int:
    """Stack the parallel linear weights in a tensor group. Their recipes retain all segments.

    Linears with different formats or fidelities are not merged. A note has the reason.
    """
    return merge_families(graph_module, ctx)


def merge_families(
    graph_module: GraphModule,
    ctx: PassContext,
    groups: tuple[str, ...] = (),
    *,
    without: str = "",
) -> int:
    """Merge parallel linears, optionally only in ``groups``. Return the number of merged
    linears. A linear whose module is named ``without`` is not merged.
    """
    families: dict[tuple[Node, str | None], list[Node]] = defaultdict(list)
    for node in find_calls(graph_module.graph, ops.linear):
        source = node.args[0]
        assert isinstance(source, Node)
        if without and info(node).fqn.endswith(f".{without}"):
            continue
        if not groups or info(node).tensor_group in groups:
            families[source, info(node).tensor_group].append(node)
    count = 0
    for family in families.values():
        if len(family) < 2:
            continue
        reason = why_apart(family)
        if reason:
            names = ", ".join(info(node).fqn for node in family)
            ctx.notes.append(f"not merged: {names} ({reason})")
        else:
            merge(family)
            count += 1
    return count


def why_apart(family: list[Node]) -> str:
    """Return the reason against merging these linears, or an empty text."""
    facts = [info(node) for node in family]
    found = [info(_weight(node)).recipe for node in family]
    recipes = [recipe for recipe in found if recipe is not None]
    if len(recipes) < len(found) or any(r.pad_rows for r in recipes):
        return "padded"
    formats = {(r.format, r.block_axis) for r in recipes}
    if len(formats) > 1:
        return "formats " + ", ".join(sorted(str(f) for f, _ in formats))
    if len({r.is_stored for r in recipes}) > 1:
        return f"{recipes[0].format} as stored, and quantised anew"
    if any(map(_ends_inside_a_block, recipes[:-1])):
        return "blocks along out would span two of them"
    if len({fact.compute for fact in facts}) > 1:
        return "unequal fidelities"
    if len({_bias(node) is None for node in family}) > 1:
        return "only some have a bias"
    return ""


def _ends_inside_a_block(recipe: WeightRecipe) -> bool:
    """Return whether the next recipe's rows would share a block with this recipe's last rows.

    Sharing would change their values.
    """
    if recipe.format is None or recipe.block_axis == "in":
        return False
    return recipe.shape[0] % get_format(recipe.format).block != 0


def merge(family: list[Node]) -> None:
    """Replace linears with a merged linear and output slices. The merged linear runs in the first's
    place.
    """
    first = family[0]
    width = sum(node.meta["val"].shape[-1] for node in family)
    path = info(first).fqn.rpartition(".")[0]
    name = f"{path}.{'_'.join(info(node).fqn.rpartition('.')[2] for node in family)}"
    weight = _merge_inputs([_weight(node) for node in family], f"{name}.weight", width)
    biases = [bias for node in family if (bias := _bias(node)) is not None]
    args: tuple[Node, ...] = (first.args[0], weight)  # type: ignore[assignment]
    if biases:
        args += (_merge_inputs(biases, f"{name}.bias", width),)
    merged = emit(first, ops.linear, args, facts=dataclasses.replace(info(first), fqn=name))
    sizes = [node.meta["val"].shape[-1] for node in family]
    facts = dataclasses.replace(info(merged), formats=None, compute=None, tensor_group=None)
    split = emit(first, torch.ops.aten.split_with_sizes.default, (merged, sizes, -1), facts=facts)
    for index, node in enumerate(family):
        replace(node, emit(first if node is first else node, operator.getitem, (split, index)))


def _merge_inputs(parts: list[Node], name: str, rows: int) -> Node:
    """Replace placeholders with a placeholder for the stacked rows."""
    graph = parts[0].graph
    recipes = [recipe for part in parts if (recipe := info(part).recipe) is not None]
    with graph.inserting_before(parts[0]):
        merged = graph.placeholder(name.replace(".", "_"))
    fake = parts[0].meta["val"]
    merged.meta["val"] = fake.new_empty((rows, *fake.shape[1:]))
    set_info(merged, info(parts[0]), fqn=name, recipe=concatenate(recipes))
    return merged


def _weight(node: Node) -> Node:
    weight = node.args[1]
    assert isinstance(weight, Node)
    return weight


def _bias(node: Node) -> Node | None:
    bias = node.args[2] if len(node.args) > 2 else None
    return bias if isinstance(bias, Node) else None
