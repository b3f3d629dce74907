"""Construction of a graph's numeric contract from a target's answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from tilewright.compiler import ops
from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.state import PER_TOKEN
from tilewright.compiler.precision import MIXED
from tilewright.compiler.targets.contract.record import (
    AS_IT_IS,
    NOT_HONOURED,
    ContractEntry,
    Meaning,
    Meanings,
    NumericContract,
)


def build_contract(graph_module: GraphModule, meanings: Meanings) -> NumericContract:
    """Query the target for all formats and fidelities in the graph. Layers with equal answers share
    a line.
    """
    layers: dict[tuple[str, str, Meaning], set[int | None]] = defaultdict(set)
    products = ops.linear, ops.fused_linear, ops.expert_linear, ops.fused_expert_linear
    with_weights = *products, ops.embedding
    for node in find_calls(graph_module.graph, *with_weights):
        _add_product(layers, info(node), info(node.args[1]), meanings)  # type: ignore[arg-type]
    for node in find_calls(graph_module.graph, ops.experts):
        weights = [info(weight) for weight in node.args[2:5]]  # type: ignore[arg-type]
        for weight in weights:
            _add_product(layers, weight, weight, meanings, weights)
    for node in graph_module.graph.nodes:
        facts = info(node)
        if facts.state is not None and facts.state.kind == PER_TOKEN:
            wanted = facts.state.format
            layers["kv_cache", wanted, meanings.kv_cache(wanted)].add(facts.layer)
            if values := facts.state.value_format:
                layers["v_cache", values, _values(meanings, wanted, values)].add(facts.layer)
        if facts.op_group == "sdpa" and facts.compute is not None:
            for phase in ("prefill", "decode"):
                fidelity = getattr(facts.compute, phase)
                meaning = meanings.attention(fidelity, phase)
                layers[f"sdpa_{phase}", fidelity, meaning].add(facts.layer)
    everywhere = {layer for found in layers.values() for layer in found if layer is not None}
    used: dict[tuple[str, str], set[int | None]] = defaultdict(set)
    for (field, _, meaning), found in layers.items():
        is_ignored = field == "v_cache" and meanings.v_cache is None
        if meaning != AS_IT_IS and not is_ignored:  # else equal to the default
            used[field, meaning.effective] |= found
    return NumericContract(
        tuple(
            ContractEntry(field, _spell(found, everywhere), requested, meaning)
            for (field, requested, meaning), found in layers.items()
        ),
        tuple(sorted((f, _spell(found, everywhere), value) for (f, value), found in used.items())),
    )


def _values(meanings: Meanings, keys: str, values: str) -> Meaning:
    """Return the meaning of a values' format that differs from the keys'."""
    if meanings.v_cache is not None:
        return meanings.v_cache(values)
    return Meaning(NOT_HONOURED, meanings.kv_cache(keys).effective)


def _add_product(
    layers: dict[tuple[str, str, Meaning], set[int | None]],
    facts: NodeInfo,
    weight: NodeInfo,
    meanings: Meanings,
    together: Sequence[NodeInfo] = (),
) -> None:
    """Add a matmul's lines. ``together`` has the metadata of all weights in its op."""
    recipe = weight.recipe
    assert recipe is not None and recipe.format is not None
    wanted = recipe.format if recipe.block_axis == "in" else f"{recipe.format}/out"
    meaning = meanings.weight(recipe.format, recipe.block_axis)
    if recipe.is_stored:  # other values than the format's quantizer selects
        meaning = replace(meaning, effective=f"{meaning.effective} as stored")
    layers[f"{facts.tensor_group} weights", wanted, meaning].add(facts.layer)
    if facts.compute is None or facts.formats is None:
        return
    for phase in ("prefill", "decode"):
        fidelity = getattr(facts.compute, phase)
        answer = meanings.fidelity(recipe.format, recipe.block_axis, fidelity, phase)
        if meanings.together is not None and together:
            answer = meanings.together([_fidelity_of(each, meanings, phase) for each in together])
        layers[f"{facts.op_group} {phase}", fidelity, answer].add(facts.layer)
    activation = facts.formats.in0
    layers["activation", activation, meanings.activation(activation)].add(facts.layer)
    output = facts.formats.out
    if output != MIXED:
        layers["block_output", output, meanings.block_output(output)].add(facts.layer)


def _fidelity_of(weight: NodeInfo, meanings: Meanings, phase: str) -> Meaning:
    recipe = weight.recipe
    assert recipe is not None and recipe.format is not None and weight.compute is not None
    wanted = getattr(weight.compute, phase)
    return meanings.fidelity(recipe.format, recipe.block_axis, wanted, phase)


def _spell(found: set[int | None], everywhere: set[int]) -> str:
    """Return an empty text for all layers or none, else ranges such as ``0-3, 7``."""
    numbers = sorted(layer for layer in found if layer is not None)
    if not numbers or set(numbers) == everywhere:
        return ""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
