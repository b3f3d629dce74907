"""A module's tracing to an FX graph with torch.export: flat tokens, dynamic length, lifted
weights.

Each node gets its module path. Tracing lowers and decomposes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from tilewright.compiler import ops
from tilewright.compiler.ir.info import COMPUTE, CONSTANT, INPUT, WEIGHT, NodeInfo, set_info
from tilewright.compiler.ir.lazy import lazy_modules, module_of, without_stacks
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.precision import GroupedModule
from tilewright.compiler.repeated_layers import expand, repeated_layers

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_NUMBER = re.compile(r"_\d+$")  # of a node's name. The copy of the graph numbers names anew.
_GROUPED = {
    torch.ops.aten.linear.default,
    torch.ops.aten.embedding.default,
    ops.attention.overload,
    ops.expert_linear.overload,
}
_EXAMPLE_LENGTH = 7  # above 1: torch.export makes a length of 1 a constant


class ParameterSource(Protocol):
    """Parameter value location in a checkpoint.

    Attributes:
        tensor: Tensor name.
        rows: Half-open range over all axes except the last. None: all rows.
        offset: Number added to the values.
    """

    @property
    def tensor(self) -> str: ...
    @property
    def rows(self) -> tuple[int, int] | None: ...
    @property
    def offset(self) -> float: ...


class TraceableModel(Protocol):
    """The compiler's view of a model, an ``nn.Module`` on the meta device.

    ``forward`` maps ``tokens [T]`` and ``positions [T]`` to ``logits [T, vocab]``.
    ``tensor_groups`` maps globs of module paths to tensor groups. ``sources()`` locates parameters
    without a checkpoint tensor with the same name. Their sources are in row order.
    ``constants(max_context)`` returns the buffer values for sequences up to this length. None is
    the model's maximum length.
    """

    tensor_groups: Mapping[str, str]

    def sources(self) -> Mapping[str, Any]: ...
    def constants(self, max_context: int | None = None) -> dict[str, Tensor]: ...


def trace(module: TraceableModel) -> fx.GraphModule:
    """Trace a module to a graph with inputs ``tokens``, ``positions``, all weights and all
    constants.

    A shared weight (tied embeddings) becomes an input per use, so each use can have its own format.
    Their recipes name the same checkpoint tensor.
    """
    assert isinstance(module, nn.Module)
    inputs, sizes = _example_inputs(module)
    export = partial(
        torch.export.export, module, tuple(inputs.values()), dynamic_shapes=sizes, strict=False
    )
    with without_stacks(), lazy_modules():
        with repeated_layers(module):
            exported = export()
        if not expand(exported.graph):
            exported = export()
    return _copy_with_info(exported, module, tuple(inputs))


def _example_inputs(module: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """Return example inputs by name, and their dynamic sizes. A vision tower has its own."""
    if hasattr(module, "trace_inputs"):
        inputs: tuple[dict[str, Tensor], Any] = module.trace_inputs()  # type: ignore[operator]
        return inputs
    # Two tensors: torch.export merges an argument passed twice.
    tokens, positions = torch.empty((2, _EXAMPLE_LENGTH), dtype=torch.int64, device="meta").clone()
    length = torch.export.Dim("length", min=2, max=1 << 24)
    return {"tokens": tokens, "positions": positions}, ({0: length}, {0: length})


def grouped_modules(module: TraceableModel) -> tuple[GroupedModule, ...]:
    """Return the modules with a tensor group, in model order, without tracing."""
    assert isinstance(module, nn.Module)
    group_of = _group_finder(module.tensor_groups)
    names = [name for name, _ in module.named_modules()]
    found = ((name, group) for name in names if (group := group_of(name)) is not None)
    return tuple(GroupedModule(name, group, _layer(name)) for name, group in found)


def _copy_with_info(
    exported: Any, module: nn.Module, input_names: tuple[str, ...]
) -> fx.GraphModule:
    """Copy the exported graph, inputs first, without torch.export's calling convention."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    facts_of = _input_facts(specs, module, input_names)
    group_of = _group_finder(module.tensor_groups)  # type: ignore[arg-type]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    users_first = [node for node in placeholders if facts_of[node.name].role == INPUT]
    for node in users_first:
        copies[node] = _copy_input(graph, node, facts_of[node.name])
    rest = [node for node in placeholders if node not in copies]
    shared: dict[fx.Node, list[fx.Node]] = {}
    for node in rest:
        uses = 1 if facts_of[node.name].role == CONSTANT else len(node.users)
        shared[node] = [_copy_input(graph, node, facts_of[node.name], use) for use in range(uses)]

    def lookup(argument: fx.Node) -> fx.Node:
        if argument not in shared:
            return copies[argument]
        left = shared[argument]
        return left.pop(0) if len(left) > 1 else left[0]

    for node in exported.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
            name = _NUMBER.sub("", node.name)
            copies[node] = copy = graph.create_node(node.op, node.target, args, kwargs, name)
            copy.meta = {"val": node.meta.get("val")}
            set_info(copy, _node_facts(node, group_of))
        elif node.op == "output":
            (logits,) = node.args[0]
            graph.output(copies[logits])
    return module_of(graph)


def _copy_input(graph: fx.Graph, node: fx.Node, facts: NodeInfo, use: int = 0) -> fx.Node:
    name = facts.fqn.replace(".", "_")
    copy = graph.placeholder(name if use == 0 else f"{name}_use{use}")
    copy.meta = {"val": node.meta["val"]}
    set_info(copy, facts if facts.role != INPUT else NodeInfo(role=INPUT))
    return copy


def _input_facts(
    specs: Mapping[str, Any], module: nn.Module, input_names: tuple[str, ...]
) -> dict[str, NodeInfo]:
    """Return the NodeInfo for each placeholder, by its name in the exported graph."""
    first_name: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical[name] = first_name.setdefault(id(parameter), name)
    sources: Mapping[str, tuple[ParameterSource, ...]] = module.sources()  # type: ignore[operator]
    facts: dict[str, NodeInfo] = {}
    inputs = iter(input_names)
    for name, spec in specs.items():
        if spec.target is None:
            facts[name] = NodeInfo(fqn=next(inputs), role=INPUT)
        elif spec.target in canonical:
            fqn = canonical[spec.target]
            shape = tuple(module.get_parameter(spec.target).shape)
            recipe = WeightRecipe(_segments(fqn, shape, sources.get(fqn)), shape)
            facts[name] = NodeInfo(fqn=fqn, role=WEIGHT, layer=_layer(fqn), recipe=recipe)
        else:
            shape = tuple(module.get_buffer(spec.target).shape)
            recipe = WeightRecipe((Segment(spec.target, shape[0]),), shape, format="fp32")
            facts[name] = NodeInfo(fqn=spec.target, role=CONSTANT, recipe=recipe)
    return facts


def _segments(
    fqn: str, shape: tuple[int, ...], sources: tuple[ParameterSource, ...] | None
) -> tuple[Segment, ...]:
    """Return a weight's segments. Sources without ``rows`` divide the rows equally."""
    part, num_rows = _part(fqn), math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
    if sources is None:
        return (Segment(fqn, num_rows, part=part),)
    each_rows = num_rows // len(sources)
    return tuple(
        Segment(
            one.tensor,
            each_rows if one.rows is None else one.rows[1] - one.rows[0],
            rows=one.rows,
            part=part,
            offset=one.offset,
        )
        for one in sources
    )


def _part(fqn: str) -> str:
    """Return the role of a tensor's rows: ``q`` for ``...q_proj.weight``."""
    module_path = fqn.rpartition(".")[0]
    return module_path.rpartition(".")[2].removesuffix("_proj")


def _layer(fqn: str) -> int | None:
    found = _LAYER.search(fqn)
    return int(found.group(1)) if found else None


def _group_finder(groups: Mapping[str, str]) -> Callable[[str], str | None]:
    def find(fqn: str) -> str | None:
        return next((group for glob, group in groups.items() if fnmatchcase(fqn, glob)), None)

    return find


def _node_facts(node: fx.Node, group_of: Callable[[str], str | None]) -> NodeInfo:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    fqn = stack[-1][0] if stack else ""
    group = group_of(fqn) if node.target in _GROUPED else None
    return NodeInfo(fqn=fqn, role=COMPUTE, layer=_layer(fqn), tensor_group=group)
