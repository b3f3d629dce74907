"""Bytes of a model and its state on a target, and the bytes moved per decode step, by group.

Computed before compiling, without reading weights. The model is lowered with a single layer for
each set of equal layers, in a fraction of the time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.fx import GraphModule

from tilewright.compiler.driver import CompilableModel, lower_model, stored_formats
from tilewright.compiler.precision import OP_GROUP_OF, PHASES, ResolvedPrecision
from tilewright.compiler.targets.interface.base import Target
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.evaluate.measure.roofline import MEMORY, TrafficShare, state_shares, weight_shares

_LAYERS = re.compile(r"(?:^|\.)layers$")
_SCALARS = (int, float, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of ``batch`` sequences with ``context`` positions, by group.

    A step reads the whole state, and writes the parts that do not grow.

    Attributes:
        shares: bytes per tensor group.
        position_bytes: keys and values of a position in all layers. Layers with a window may store
            fewer positions.
        memory_bytes: other state per sequence.
    """

    shares: tuple[TrafficShare, ...]
    position_bytes: int
    memory_bytes: int

    @property
    def total(self) -> TrafficShare:
        """The sum over all tensor groups."""
        return _joined("total", self.shares)


def estimate_memory(
    model: CompilableModel,
    precision: ResolvedPrecision,
    target: Target,
    *,
    batch: int,
    context: int,
    compute: str,
) -> MemoryEstimate:
    """Return a loaded model's plan, without constants.

    Raises:
        CompileError: for a weight that the target cannot store.
    """
    outline = lower_outline(model, precision, target)
    count, graph = outline.count, outline.graph
    weights = weight_shares(graph, target, num_tokens=batch, compute=compute, count=count)
    states = list(state_shares(graph, target, context=context, compute=compute, count=count))
    position = state_shares(graph, target, context=1, compute=compute, count=count)
    shares = [share for share in weights if not share.is_constant]
    shares += [replace(e, stored=batch * e.stored, moved=batch * e.moved) for e in states]
    memory = sum(share.stored for share in states if share.group == MEMORY)
    return MemoryEstimate(
        shares=tuple(
            _joined(name, [share for share in shares if share.group == name])
            for name in dict.fromkeys(share.group for share in shares)
        ),
        position_bytes=round(sum(share.stored for share in position if share.group != MEMORY)),
        memory_bytes=int(memory),
    )


def _joined(group: str, shares: Iterable[TrafficShare]) -> TrafficShare:
    shares = list(shares)
    return TrafficShare(
        group,
        tuple(dict.fromkeys(name for share in shares for name in share.formats)),
        tuple(dict.fromkeys(name for share in shares for name in share.kinds)),
        sum(share.num_weights for share in shares),
        sum(share.stored for share in shares),
        sum(share.moved for share in shares),
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph with some layers of the model. ``counts`` has the number of equal layers."""

    graph: GraphModule
    counts: dict[int, int]

    def count(self, layer: int | None) -> int:
        """Return the number of layers equal to this layer, 1 outside layers."""
        return 1 if layer is None else self.counts[layer]


def lower_outline(model: CompilableModel, precision: ResolvedPrecision, target: Target) -> Outline:
    """Lower a model for a target without layers that equal another layer.

    Raises:
        CompileError: if model, precision and target do not fit together.
    """
    stored = stored_formats(model)
    like: dict[Hashable, list[str]] = defaultdict(list)
    for place, layers in _lists_of_layers(model.module):
        for name, layer in layers.named_children():
            path = f"{place}.{name}"
            settings = _settings_of(model.module.tensor_groups, path, layer, precision)
            formats = tuple(stored[name] for name, _ in layer.named_parameters(prefix=path))
            like[_built(layer), settings, formats].append(path)
    kept = {paths[0]: len(paths) for paths in like.values()}
    with _only(model.module, set(kept)):
        graph_module, _ = lower_model(model, precision, target.stages(), silent)
    return Outline(graph_module, {_number(path): count for path, count in kept.items()})


def _lists_of_layers(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    return [
        (path, layers)
        for path, layers in module.named_modules()
        if isinstance(layers, nn.ModuleList) and _LAYERS.search(path)
    ]


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


def _built(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules with equal types, sizes and settings.

    Values that cannot be compared use their identity: an additional layer is slow, a missing layer
    would be wrong.
    """
    settings: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if not name.startswith("_"):
            settings.append((name, value if isinstance(value, _SCALARS) else id(value)))
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    children = [(name, _built(child)) for name, child in module.named_children()]
    return type(module), tuple(settings), tuple(tensors), tuple(children)


def _settings_of(
    groups: Any, path: str, layer: nn.Module, precision: ResolvedPrecision
) -> tuple[Hashable, ...]:
    """Return every format and fidelity of a layer's modules."""
    keys: list[Hashable] = []
    number = _number(path)
    for name, _ in layer.named_modules(prefix=path):
        own = next((group for glob, group in groups.items() if fnmatchcase(name, glob)), None)
        if own is None:
            continue
        for group in {own, "kv_cache", "activation"}:
            keys.append((group, precision.format(group, layer=number, fqn=name)))
        for family in filter(None, {OP_GROUP_OF.get(own), "sdpa"}):
            keys += [
                (family, phase, precision.fidelity(family, phase, layer=number, fqn=name))
                for phase in PHASES
            ]
    return tuple(sorted(keys, key=repr))


@contextmanager
def _only(module: nn.Module, kept: set[str]) -> Iterator[None]:
    """Remove the other layers from the module during the block. Numbers are unchanged."""
    lists = _lists_of_layers(module)
    whole = [(layers, layers._modules) for _, layers in lists]
    for path, layers in lists:
        some = {name: layer for name, layer in layers._modules.items() if f"{path}.{name}" in kept}
        layers._modules = some
    try:
        yield
    finally:
        for layers, modules in whole:
            layers._modules = modules
