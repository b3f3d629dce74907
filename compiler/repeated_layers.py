"""Fast tracing of a model with equal layers.

Only the first of equal layers is traced. An operator represents every further layer, and
:func:`expand` replaces it by copies of the first layer's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

_LIBRARY = torch.library.Library("tilewright_trace", "DEF")
_LIBRARY.define("enter(Tensor[] inputs, int call) -> ()")
_LIBRARY.define("leave(Tensor[] outputs) -> ()")
_LIBRARY.define(
    "repeat(Tensor[] inputs, Tensor[] outputs, int call, str first, str layer) -> Tensor[]"
)
_ENTER = torch.ops.tilewright_trace.enter.default
_LEAVE = torch.ops.tilewright_trace.leave.default
_REPEAT = torch.ops.tilewright_trace.repeat.default


@torch.library.register_fake("tilewright_trace::repeat", lib=_LIBRARY)
def _fake(inputs: Any, outputs: Any, *names: Any) -> list[Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in outputs
    ]


for _mark in (_ENTER, _LEAVE):
    torch.library.register_fake(_mark, lambda *_: None, lib=_LIBRARY)
    fx.node.has_side_effect(_mark)  # torch removes other calls without results

_SIZES = torch.SymInt, torch.SymFloat, torch.SymBool
_PURE = ("tilewright.models.", "torch.nn.")
"""Packages whose modules compute a function of their arguments, parameters and buffers. Modules of
users may also read or change other state.
"""


@dataclass(slots=True)
class _LayerNodes:
    """A call's nodes between its marks. The marks' arguments change with the graph."""

    enter: fx.Node
    leave: fx.Node | None = None
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def inputs(self) -> Any:
        """Nodes for inputs and weights."""
        return self.enter.args[0]

    @property
    def outputs(self) -> Any:
        """Nodes for outputs."""
        assert self.leave is not None
        return self.leave.args[0]

    @property
    def is_closed(self) -> bool:
        """Return whether the nodes read nothing else that can differ between layers.

        Shapes of inputs are equal for all layers. Sizes from values are not.
        """
        known = {*self.inputs, *self.nodes}
        read = {source for node in self.nodes for source in node.all_input_nodes} - known
        return all(
            isinstance(node.meta.get("val"), _SIZES) and not _is_from_values(node) for node in read
        )


@dataclass(frozen=True, slots=True)
class _FirstCall:
    """The first call among equal calls, with its tensors in the trace."""

    number: int
    layer: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    spec: Any

    def is_for(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether the inputs have equal shapes and strides. Adds no guards."""
        pairs = zip(inputs, self.inputs, strict=True)
        return all(
            _are_equal(a.shape, b.shape) and _are_equal(a.stride(), b.stride()) for a, b in pairs
        )


@contextmanager
def repeated_layers(module: nn.Module) -> Iterator[None]:
    """Trace equal layers in the outermost lists of ``module`` once. :func:`expand` must follow.

    Layers are equal if their classes, attributes and parameter shapes are, and calls if their
    arguments have equal shapes, types and values. A layer with attributes other than numbers,
    strings, functions, dataclasses and their sequences equals no other layer. Layers with modules
    from outside `_PURE`, with hooks, or of a model that has a module twice, are always traced.
    """
    layers, wrapped = _Layers(), []
    if not _has_module_twice(module):  # torch traces such a model with proxies of its modules
        wrapped = [(name, layer) for name, layer in _listed(module) if _is_pure(layer)]
    try:
        for name, layer in wrapped:
            vars(layer)["forward"] = layers.wrap(name, layer)
        yield
    finally:
        for _, layer in wrapped:
            vars(layer).pop("forward", None)


class _Layers:
    """Calls in a trace by their structure."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[_FirstCall]] = {}
        self._num_calls, self._is_inside = 0, False

    def wrap(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        """Return a ``forward`` that represents repeated calls."""
        forward = layer.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a layer of another layer
                return forward(*args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            inputs = [*tensors, *(weight for _, weight in _weights(layer))]
            types = tuple(
                leaf.dtype if isinstance(leaf, Tensor) else _value(leaf) for leaf in leaves
            )
            key = _structure(layer), str(spec), types, _firsts(inputs)
            known = self._calls.setdefault(key, [])
            first = next((earlier for earlier in known if earlier.is_for(tensors)), None)
            if first is not None:
                found: Any = _REPEAT(inputs, first.outputs, first.number, first.layer, name)
                return pytree.tree_unflatten(found, first.spec)
            number, self._num_calls = self._num_calls, self._num_calls + 1
            _ENTER(inputs, number)
            self._is_inside = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._is_inside = False
            results, result_spec = pytree.tree_flatten(result)
            outputs = [output for output in results if isinstance(output, Tensor)]
            _LEAVE(outputs)
            if len(outputs) == len(results):
                known.append(_FirstCall(number, name, tensors, outputs, result_spec))
            return result

        return call


def expand(graph: fx.Graph) -> bool:
    """Replace repeated layers by copies of the first layers' nodes. Sizes are not copied.

    Return False if a layer reads other tensors than its inputs and weights: the graph must be
    traced again without :func:`repeated_layers`.
    """
    layers: dict[Any, _LayerNodes] = {}
    current: _LayerNodes | None = None
    for node in list(graph.nodes):
        if node.target is _ENTER:
            layers[node.args[1]] = current = _LayerNodes(node)
        elif node.target is _LEAVE:
            assert current is not None
            current.leave, current = node, None
        elif current is not None and not isinstance(node.meta.get("val"), _SIZES):
            current.nodes.append(node)
    repeats = graph.find_nodes(op="call_function", target=_REPEAT)
    if not all(layers[node.args[2]].is_closed for node in repeats):
        return False
    for node in repeats:
        _copy(node, layers[node.args[2]])
    for mark in (_ENTER, _LEAVE):
        for node in graph.find_nodes(op="call_function", target=mark):
            graph.erase_node(node)
    return True


def _copy(repeat: fx.Node, layer: _LayerNodes) -> None:
    """Replace a node by copies from a layer."""
    inputs, _, _, first, name = repeat.args
    copies = dict(zip(layer.inputs, inputs, strict=True))  # type: ignore[arg-type]
    with repeat.graph.inserting_before(repeat):
        for node in layer.nodes:
            copies[node] = copy = repeat.graph.node_copy(node, lambda old: copies.get(old, old))
            stack = node.meta.get("nn_module_stack", {}).items()
            moved = {key: (_moved(path, first, name), rest) for key, (path, rest) in stack}
            copy.meta["nn_module_stack"] = moved
    for user in list(repeat.users):  # an item of the results
        output = layer.outputs[user.args[1]]
        user.replace_all_uses_with(copies.get(output, output))
        repeat.graph.erase_node(user)
    repeat.graph.erase_node(repeat)


def _moved(path: str, first: Any, layer: Any) -> str:
    """Return a module's path in another layer."""
    is_inside = path == first or path.startswith(f"{first}.")
    return f"{layer}{path[len(first) :]}" if is_inside else path


def _listed(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and members of the outermost lists."""
    for name, child in module.named_children():
        members = child.named_children() if isinstance(child, nn.ModuleList) else _listed(child)
        yield from ((f"{name}.{inner}", layer) for inner, layer in members)


def _has_module_twice(module: nn.Module) -> bool:
    num_paths = sum(1 for _ in module.named_modules(remove_duplicate=False))
    return num_paths > sum(1 for _ in module.modules())


def _is_pure(layer: nn.Module) -> bool:
    return "forward" not in vars(layer) and all(
        type(m).__module__.startswith(_PURE)
        and not any(value for key, value in vars(m).items() if key.endswith("_hooks"))
        for m in layer.modules()
    )


def _is_from_values(node: fx.Node) -> bool:
    """Return whether a size depends on the values of a tensor."""
    return node.target is not torch.ops.aten.sym_size.int and any(
        isinstance(source.meta.get("val"), Tensor) or _is_from_values(source)
        for source in node.all_input_nodes
    )


def _structure(layer: nn.Module) -> Any:
    """Return a value that is equal for equal layers."""
    usual = vars(nn.Module()).keys() - {"training"} | {"forward"}
    modules = tuple(
        (name, type(m), *sorted((k, _value(v)) for k, v in vars(m).items() if k not in usual))
        for name, m in layer.named_modules()
    )
    return modules, tuple((name, tuple(x.shape), x.dtype) for name, x in _weights(layer))


def _weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def _value(value: Any) -> tuple[Any, ...]:
    """Describe a value. An object without a description equals nothing."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value).__qualname__, repr(value)
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return type(value).__qualname__, f"{value.__module__}.{value.__qualname__} {id(value)}"
    if isinstance(value, tuple | list):
        return type(value).__qualname__, *(_value(item) for item in value)
    if is_dataclass(value):
        items = (getattr(value, entry.name) for entry in fields(value))
        return f"{type(value).__qualname__} {id(type(value))}", *map(_value, items)
    return "object", object()


def _are_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    pairs = zip(sizes, others, strict=False)
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in pairs)


def _firsts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the index of the first occurrence, by tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))
