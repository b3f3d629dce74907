"""Stable text for graphs: dumps, golden tests and reading. A line per node, without addresses."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from tilewright.compiler.ir.info import COMPUTE, NodeInfo, Sharding, info
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN
from tilewright.compiler.ops import OPERATORS

_INPUT_DIMENSIONS = {
    "tokens": ("T",),
    "patches": ("T",),
    "cross_cache": ("V",),
    "slots": ("N",),
    "cu_seqlens": ("N+1",),
    "logit_rows": ("R",),
    PER_TOKEN: ("S", "2", "L"),
    PER_SEQUENCE: ("S",),
}


def dimension_names(graph: Graph) -> dict[str, str]:
    """Return names for the graph's symbolic sizes, taken from the inputs with these sizes."""
    sizes: dict[str, str] = {}
    for node in graph.nodes:
        fake = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(fake, torch.Tensor):
            continue
        state = info(node).state
        kind = str(node.target) if state is None else state.kind
        for size, name in zip(fake.shape, _INPUT_DIMENSIONS.get(kind, ()), strict=False):
            if not isinstance(size, int):
                sizes.setdefault(str(size), name)
    return sizes


class _Names:
    """Names of values (numbers, in order) and of symbolic sizes."""

    def __init__(self, graph: Graph) -> None:
        self.values: dict[Node, str] = {}
        self.sizes = dimension_names(graph)

    def value(self, node: Node) -> str:
        return self.values.setdefault(node, f"%{len(self.values)}")

    def size(self, size: Any) -> str:
        return str(size) if isinstance(size, int) else self.sizes.get(str(size), str(size))


def graph_text(graph: Graph, *, layer: int | None = None) -> str:
    """Print a graph, with a line per node. ``layer`` selects the compute nodes of a single
    layer.
    """
    names = _Names(graph)
    lines = []
    for node in graph.nodes:
        line = _line(node, names)
        wanted = layer is None or (info(node).layer == layer and node.op == "call_function")
        if line and wanted:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _line(node: Node, names: _Names) -> str:
    if node.op == "placeholder":
        facts = info(node)
        return f"{_label(node)}: {_type(node.meta.get('val'), names)} = {facts.role}{_notes(facts)}"
    if node.op == "output":
        return "return " + _argument(node.args[0], names)
    if node.target is operator.getitem:
        source, index = node.args
        names.values[node] = f"{names.value(source)}.{index}"  # type: ignore[arg-type]
        return ""
    result = names.value(node)
    arguments = ", ".join(_argument(argument, names) for argument in node.args)
    for key, argument in node.kwargs.items():
        arguments += f", {key}={_argument(argument, names)}"
    head = f"{result}: {_type(node.meta.get('val'), names)} = {operator_name(node)}({arguments})"
    return head + _notes(info(node))


def operator_name(node: Node) -> str:
    """Return the printed name: ``linear``, ``aten.mul.Tensor`` for torch, ``getitem`` for
    Python.
    """
    if node.target in OPERATORS:
        return OPERATORS[node.target].name
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removeprefix("torch.ops.")


def _label(node: Node) -> str:
    facts = info(node)
    return facts.fqn if facts.fqn else str(node.target)


def _argument(value: Any, names: _Names) -> str:
    if isinstance(value, Node):
        return _label(value) if value.op == "placeholder" else names.value(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(item, names) for item in value) + "]"
    return repr(value) if isinstance(value, float) else str(value)


def _type(fake: Any, names: _Names) -> str:
    if isinstance(fake, torch.Tensor):
        dtype = str(fake.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(names.size(size) for size in fake.shape)}]"
    if isinstance(fake, list | tuple):
        return "(" + ", ".join(_type(item, names) for item in fake) + ")"
    return "?"


def _notes(facts: NodeInfo) -> str:
    notes = []
    if facts.tensor_group:
        notes.append(f"group={facts.tensor_group}")
    if facts.recipe is not None and facts.recipe.format:
        axis = "" if facts.recipe.block_axis == "in" else f"/{facts.recipe.block_axis}"
        axis = "/stored" if facts.recipe.is_stored else axis
        notes.append(f"format={facts.recipe.format}{axis}")
        if len(facts.recipe.segments) > 1:
            notes.append("parts=" + "|".join(part.part or "?" for part in facts.recipe.segments))
    if facts.state is not None:
        values = facts.state.value_format
        both = f"{facts.state.format}/{values}" if values else facts.state.format
        notes.append(f"format={both} {facts.state.kind}")
    if facts.role == COMPUTE and facts.formats is not None and facts.formats.in1:
        notes.append(f"weight={facts.formats.in1}")
    if facts.compute is not None:
        same = facts.compute.prefill == facts.compute.decode
        by_phase = f"{facts.compute.prefill}/{facts.compute.decode}"
        notes.append(f"fidelity={facts.compute.decode if same else by_phase}")
    if facts.placement is not None:
        notes += _places(facts.placement)
    return "  {" + ", ".join(notes) + "}" if notes else ""


def _places(placement: Sharding) -> list[str]:
    """Print a sharding. Examples: ``sharded=0/r:24+24`` is axis 0 over all ranks, ``partial=r`` is
    partial sums.
    """
    sharded = [
        f"sharded={each.axis}/{each.over}:{'+'.join(map(str, each.split.sizes))}"
        for each in placement.sharded
    ]
    return [*sharded, *([f"partial={placement.partial}"] if placement.partial else [])]
