"""Assigns a format to each weight and a fidelity to each matmul, from the resolved
configuration.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import (
    STORED_NAMES,
    exact_blocks,
    get_format,
    is_quantised,
    stored_format,
    stored_together,
)
from tilewright.compiler.ir.info import WEIGHT, Compute, EdgeFormats, info, set_info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.runner import Pass, PassContext, numerics_changing_pass
from tilewright.compiler.precision import ALWAYS_HIGH, BLOCK_OUTPUTS, OP_GROUP_OF, STORED
from tilewright.errors import CompileError

TargetFormat = Callable[[str, int], str]
"""Returns a supported format. Arguments: stored format, number of axes."""


@numerics_changing_pass
def assign_precision(graph_module: GraphModule, ctx: PassContext) -> int:
    """Assign formats to weights, and fidelities to nodes by phase.

    A weight has the same format in all phases. Norms, biases and constants stay fp32.

    Raises:
        CompileError: A matmul's module has no tensor group.
    """
    return _assign(graph_module, ctx, None)


def assign_target_formats(target_format: TargetFormat) -> Pass:
    """Return `assign_precision` for a target without kernels for every stored format.

    Under ``stored``, a weight of a quantized file has the format ``target_format(name, num_axes)``.
    A note reports each change. A file of floats keeps its formats: the target refuses them.
    """

    def run(graph_module: GraphModule, ctx: PassContext) -> int:
        return _assign(graph_module, ctx, target_format)

    return Pass(assign_precision.name, run, changes_numerics=True)


def _assign(graph_module: GraphModule, ctx: PassContext, target_format: TargetFormat | None) -> int:
    products = ops.linear, ops.expert_linear
    weights = find_calls(graph_module.graph, *products, ops.embedding)
    if target_format is not None and not _is_quantised_file(weights, ctx):
        target_format = None
    changed: set[str] = set()
    for node in weights:
        changed |= _assign_weight(node, ctx, target_format)
    for node in find_calls(graph_module.graph, *products, ops.attention):
        _assign_compute(node, ctx)
    for node in graph_module.graph.nodes:
        recipe = info(node).recipe
        if info(node).role == WEIGHT and recipe is not None and recipe.format is None:
            set_info(node, recipe=recipe.with_format("fp32", "in"))
    if ctx.stored_type is not None:
        _note_requantised(graph_module, ctx, changed)
    return len(weights)


def _is_quantised_file(nodes: Sequence[Node], ctx: PassContext) -> bool:
    """Return whether the checkpoint has a quantized type for a weight of ``nodes``."""
    recipes = [info(argument).recipe for node in nodes for argument in node.all_input_nodes]
    names = {name for recipe in recipes if recipe is not None for name in recipe.names}
    return ctx.stored_type is not None and any(is_quantised(ctx.stored_type(n)) for n in names)


def _assign_weight(node: Node, ctx: PassContext, target_format: TargetFormat | None) -> set[str]:
    """Return tensors with a format that the target does not support."""
    facts, changed = info(node), set()
    if facts.tensor_group is None:
        raise CompileError(
            f"module {facts.fqn!r} has no tensor group; name it in the model's tensor_groups"
        )
    weight = node.args[1]
    assert isinstance(weight, Node)
    recipe = info(weight).recipe
    assert recipe is not None
    wanted = ctx.precision.format(facts.tensor_group, layer=facts.layer, fqn=facts.fqn)
    if ctx.calibrated is not None:
        _check_calibrated(recipe, facts.fqn, wanted, ctx)
    if wanted != STORED and _is_stored_as(recipe, wanted, ctx):
        assigned = recipe.as_stored(wanted)
    elif wanted == STORED:
        stored = _stored_format(recipe, facts.fqn, ctx)
        name = stored
        if target_format is not None:
            blocks = exact_blocks(map(ctx.stored_type, recipe.names)) if ctx.stored_type else ()
            name = target_format(stored, len(recipe.shape))
            if blocks and name == stored == "bf16":
                name = target_format(blocks[0], len(recipe.shape))
        changed = set(recipe.names) if name != stored else set()
        assigned = recipe.with_format(name, "in") if changed else recipe.as_stored(stored)
    else:
        # Without blocks the axis has no effect. A fixed axis gives equal weights equal recipes.
        axis = ctx.precision.block_axis if get_format(wanted).block > 1 else "in"
        assigned = recipe.with_format(wanted, axis)
    set_info(weight, recipe=assigned, tensor_group=facts.tensor_group)
    return changed


def _is_stored_as(recipe: WeightRecipe, wanted: str, ctx: PassContext) -> bool:
    """Return whether a weight can keep its file's quantized values.

    All its tensors must have calibrated values in this format. Packing the values again could
    select other scales.
    """
    if ctx.calibrated is None or ctx.stored_type is None or ctx.precision.block_axis != "in":
        return False
    stored = {stored_format(ctx.stored_type(name)) for name in recipe.names}
    return get_format(wanted).block > 1 and stored == {wanted}


def _check_calibrated(recipe: WeightRecipe, fqn: str, wanted: str, ctx: PassContext) -> None:
    """Reject another format or block axis for a calibrated weight. fp32 is allowed: it is exact.

    Raises:
        CompileError: The request differs from the calibration. The message has both.
    """
    assert ctx.calibrated is not None
    for name in recipe.names:
        found = ctx.calibrated(name)
        if found is None or wanted == "fp32":
            continue
        format_, axis = found
        if wanted != format_:
            raise CompileError(
                f"{fqn}: {wanted}, but the weights are calibrated for {format_}; allowed: the "
                "precision of the calibrated folder, or the original checkpoint"
            )
        assigned = ctx.target_axis or ctx.precision.block_axis
        if assigned != axis:
            raise CompileError(
                f"{fqn}: blocks along {assigned}, but the weights are calibrated for blocks along "
                f"{axis}; allowed: a target and a configuration with block_axis {axis}, or "
                f"tilewright calibrate --block-axis {assigned}"
            )


def _stored_format(recipe: WeightRecipe, fqn: str, ctx: PassContext) -> str:
    if ctx.stored_type is None:
        raise CompileError(
            f"{fqn}: format {STORED!r} without a checkpoint; allowed: a named format"
        )
    if any(segment.offset for segment in recipe.segments):
        return "fp32"  # other values than the file's
    return stored_together(map(ctx.stored_type, recipe.names))


def _note_requantised(
    graph_module: GraphModule, ctx: PassContext, changed: Collection[str]
) -> None:
    """Add notes about quantized tensors with a second rounding, and about types stored in another
    format. ``changed`` are tensors with an unsupported stored format.
    """
    assert ctx.stored_type is not None
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    known = {*STORED_NAMES.values()}
    same: dict[tuple[str, str], set[str]] = defaultdict(set)
    rounded: dict[tuple[str, str], set[str]] = defaultdict(set)
    for node in graph_module.graph.nodes:
        facts = info(node)
        recipe, group = facts.recipe, facts.tensor_group
        if facts.role != WEIGHT or group is None or recipe is None:
            continue
        for name in recipe.names:
            stored, used = ctx.stored_type(name), str(recipe.format)
            if STORED_NAMES.get(used) == stored:
                continue
            if not is_quantised(stored):
                if name in changed:
                    rounded[stored, used].add(group)
                continue
            keeps = recipe.is_stored or get_format(used).block == 1
            blocks = exact_blocks([stored]) if recipe.block_axis == "in" else ()
            is_equal = (keeps and used == stored_format(stored)) or used in blocks
            if used != "fp32" and not is_equal:
                found[stored, used].add(group)
            elif stored not in known:
                same[stored, used].add(group)
    if same:
        ctx.notes.append("stored with equal values: " + _listed(same))
    if found:
        ctx.notes.append("quantised again: " + _listed(found))
    if rounded:
        ctx.notes.append("rounded: " + _listed(rounded))


def _listed(changes: Mapping[tuple[str, str], set[str]]) -> str:
    return "; ".join(
        f"{stored} → {assigned} ({', '.join(sorted(groups))})"
        for (stored, assigned), groups in sorted(changes.items())
    )


def _assign_compute(node: Node, ctx: PassContext) -> None:
    facts = info(node)
    group = facts.tensor_group or ""
    op_group, highest = ALWAYS_HIGH.get(group, (OP_GROUP_OF.get(group), None))
    if op_group is None:
        raise CompileError(
            f"module {facts.fqn!r} is of tensor group {facts.tensor_group!r}, which has no products"
        )
    activation = ctx.precision.format("activation", layer=facts.layer, fqn=facts.fqn)
    output = "mixed"
    if group in BLOCK_OUTPUTS:
        output = ctx.precision.format("block_output", layer=facts.layer, fqn=facts.fqn)
    second = ctx.precision.format(group, layer=facts.layer, fqn=facts.fqn)
    if second == STORED:
        assert isinstance(node.args[1], Node)
        recipe = info(node.args[1]).recipe
        assert recipe is not None and recipe.format is not None
        second = recipe.format
    by_phase = {
        phase: highest or ctx.precision.fidelity(op_group, phase, layer=facts.layer, fqn=facts.fqn)
        for phase in ("prefill", "decode")
    }
    updated = dataclasses.replace(
        facts,
        op_group=op_group,
        formats=EdgeFormats(in0=activation, in1=second, out=output),
        compute=Compute(**by_phase),
    )
    set_info(node, updated)
