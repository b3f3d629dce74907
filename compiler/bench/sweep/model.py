"""A model as plans see it: its weights by group and layer, its configurations, what they weigh.

Nothing is compiled and no weight is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from compiler.driver import CompilableModel, resolve_precision
from compiler.precision import OP_GROUP_OF, PrecisionConfig, ResolvedPrecision
from compiler.targets.base import get_target


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix ``[out, in]``: the module it belongs to, its group, its layer if it is in one."""

    fqn: str
    shape: tuple[int, ...]
    group: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class SweptModel:
    """``argument`` is what ``--model`` takes; ``content_hash`` names its checkpoint's content."""

    argument: str
    name: str
    content_hash: str
    num_layers: int
    weights: tuple[Weight, ...]
    loaded: CompilableModel

    def resolve(self, precision: PrecisionConfig) -> ResolvedPrecision:
        """The configuration on this model. Raises ConfigError where it does not fit."""
        return resolve_precision(self.loaded, precision)

    def groups(self) -> list[str]:
        """The tensor groups that have weights, in the order of the model."""
        return list(dict.fromkeys(weight.group for weight in self.weights))

    def layers(self, group: str) -> list[int]:
        """The layers that a group has weights in."""
        return sorted({w.layer for w in self.weights if w.group == group and w.layer is not None})

    def held_bytes(
        self, precision: ResolvedPrecision, target: str, compute: str = "fast"
    ) -> dict[tuple[str, int | None, str], int]:
        """Bytes of the weights as a target holds them, by group, layer and kind of holding."""
        backend = get_target(target)
        found: dict[tuple[str, int | None, str], int] = defaultdict(int)
        for weight in self.weights:
            holding = backend.holding(
                weight.shape,
                precision.format(weight.group, layer=weight.layer, fqn=weight.fqn),
                block_axis=precision.block_axis,
                group=weight.group,
                compute=compute,
                fidelities=_fidelities(precision, weight),
            )
            found[weight.group, weight.layer, holding.kind] += holding.num_bytes
        return dict(found)


def total_bytes(held: Mapping[tuple[str, int | None, str], int]) -> int:
    """All of `SweptModel.held_bytes`; norms and tables are not counted."""
    return sum(held.values())


def step_bytes(held: Mapping[tuple[str, int | None, str], int]) -> dict[str, int]:
    """What a decode step reads of `SweptModel.held_bytes`, by kind: of an embedding a row only."""
    found: dict[str, int] = defaultdict(int)
    for (group, _, kind), num_bytes in held.items():
        if group != "embedding":
            found[kind] += num_bytes
    return dict(found)


def swept_model(loaded: CompilableModel, argument: str) -> SweptModel:
    """The view of a loaded model."""
    groups: Mapping[str, str] = loaded.module.tensor_groups
    weights = []
    for fqn, module in loaded.module.named_modules():
        weight = getattr(module, "weight", None)
        group = next((name for glob, name in groups.items() if fnmatchcase(fqn, glob)), None)
        if weight is not None and weight.dim() == 2 and group is not None:
            weights.append(Weight(fqn, tuple(weight.shape), group, _layer(fqn)))
    return SweptModel(
        argument=argument,
        name=loaded.name,
        content_hash=loaded.checkpoint.content_hash(),
        num_layers=loaded.config.num_layers,
        weights=tuple(weights),
        loaded=loaded,
    )


def _fidelities(precision: ResolvedPrecision, weight: Weight) -> tuple[str, str]:
    """Of the products with a weight, in prefill and decode; an embedding has none: the highest."""
    family = OP_GROUP_OF.get(weight.group)
    if family is None:
        return "hifi4", "hifi4"
    found = [
        precision.fidelity(family, phase, layer=weight.layer, fqn=weight.fqn)
        for phase in ("prefill", "decode")
    ]
    return found[0], found[1]


def _layer(fqn: str) -> int | None:
    return next((int(part) for part in fqn.split(".") if part.isdigit()), None)
