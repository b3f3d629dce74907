"""A model as plans see it: its weights by group and layer, its configurations, what they weigh.

Nothing is compiled and no weight is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tilewright.compiler.calibration.plan import EXACT_BITS
from tilewright.compiler.driver import CompilableModel, resolve_precision, stored_formats
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import Compute, NodeInfo
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.ops.moe import expected_experts
from tilewright.compiler.precision import (
    ALWAYS_HIGH,
    EXPERT_GROUPS,
    OP_GROUP_OF,
    PHASES,
    STORED,
    PrecisionConfig,
    ResolvedPrecision,
)
from tilewright.compiler.targets.interface.base import Holding, Target
from tilewright.compiler.targets.table import get_target


@dataclass(frozen=True, slots=True)
class SweepWeight:
    """A matrix ``[out, in]``, or one of each expert ``[E, out, in]``: the module it belongs to, its
    group, its layer if it is in one, and the format that its checkpoint has it in.
    """

    fqn: str
    shape: tuple[int, ...]
    group: str
    layer: int | None
    stored: str = "fp32"


@dataclass(frozen=True, slots=True)
class SweptModel:
    """``argument`` is what ``--model`` takes; ``content_hash`` names its checkpoint's content."""

    argument: str
    name: str
    content_hash: str
    num_layers: int
    weights: tuple[SweepWeight, ...]
    loaded: CompilableModel

    def resolve(self, precision: PrecisionConfig) -> ResolvedPrecision:
        """Resolve a configuration on this model. Raises ConfigError where it does not fit."""
        return resolve_precision(self.loaded, precision)

    def groups(self) -> list[str]:
        """The tensor groups that have weights, in the order of the model."""
        return list(dict.fromkeys(weight.group for weight in self.weights))

    def layers(self, group: str) -> list[int]:
        """The layers that a group has weights in."""
        return sorted({w.layer for w in self.weights if w.group == group and w.layer is not None})

    def places(self) -> dict[str, list[int]]:
        """The layers that each group has weights in."""
        return {group: self.layers(group) for group in self.groups()}

    def has_calibrated(self, precision: ResolvedPrecision) -> bool:
        """Whether a calibration chooses codes: whether a matrix has blocks under 8 bits."""
        formats = (
            get_format(precision.format(w.group, layer=w.layer, fqn=w.fqn))
            for w in self.weights
            if w.group != "embedding"
            and precision.format(w.group, layer=w.layer, fqn=w.fqn) != STORED
        )
        return any(f.block > 1 and f.element_bits < EXACT_BITS for f in formats)

    def held_bytes(
        self, precision: ResolvedPrecision, target: str, compute: str = "fast"
    ) -> dict[tuple[str, int | None, str], int]:
        """Bytes of the weights as a target holds them, by group, layer and kind of holding;
        norms and tables are not counted.
        """
        backend, blocks = get_target(target), blocks_of(self.weights)
        found: dict[tuple[str, int | None, str], int] = defaultdict(int)
        for weight in self.weights:
            others = blocks.get(weight, ())
            holding = holding_of(weight, precision, backend, compute, others=others)
            found[weight.group, weight.layer, holding.kind] += holding.num_bytes
        return dict(found)


def step_bytes(
    held: Mapping[tuple[str, int | None, str], int], experts: float = 1.0
) -> dict[str, int]:
    """What a decode step reads of `SweptModel.held_bytes`, by kind: of an embedding a row only, of
    experts that share.
    """
    found: dict[str, int] = defaultdict(int)
    for (group, _, kind), num_bytes in held.items():
        if group != "embedding":
            found[kind] += round(num_bytes * (experts if group in EXPERT_GROUPS else 1.0))
    return dict(found)


def experts_share(model: CompilableModel, batch: int) -> float:
    """The share of the experts that a decode step of so many sequences is expected to read, were
    all equally likely; 1 where there are none.
    """
    count = getattr(model.config, "num_experts", 0)
    if not count:
        return 1.0
    chosen = int(model.config.experts_per_token)
    return expected_experts(count, batch, chosen) / count


def weights_of(model: CompilableModel) -> tuple[SweepWeight, ...]:
    """The weights that belong to a group, in the order of the model; of a tied one both uses."""
    groups: Mapping[str, str] = model.module.tensor_groups
    names = {id(weight): name for name, weight in model.module.named_parameters()}
    formats, weights = stored_formats(model), []
    for fqn, module in model.module.named_modules():
        weight = getattr(module, "weight", None)
        group = next((name for glob, name in groups.items() if fnmatchcase(fqn, glob)), None)
        if weight is not None and weight.dim() >= 2 and group is not None:
            stored = formats[names[id(weight)]]
            weights.append(SweepWeight(fqn, tuple(weight.shape), group, layer_of(fqn), stored))
    return tuple(weights)


def blocks_of(weights: Sequence[SweepWeight]) -> dict[SweepWeight, tuple[SweepWeight, ...]]:
    """Map each weight of a block of experts to the others of its block."""
    blocks: dict[str, list[SweepWeight]] = defaultdict(list)
    for weight in weights:
        if weight.group in EXPERT_GROUPS:
            blocks[weight.fqn.rpartition(".")[0]].append(weight)
    return {
        weight: tuple(other for other in members if other is not weight)
        for members in blocks.values()
        for weight in members
    }


def holding_of(
    weight: SweepWeight,
    precision: ResolvedPrecision,
    target: Target,
    compute: str,
    *,
    others: Sequence[SweepWeight] = (),
) -> Holding:
    """How a target keeps a weight; ``others``: of its block of experts (see `blocks_of`).

    Raises:
        CompileError: for a weight this target cannot hold.
    """
    recipe, facts = _asked(precision, weight)
    block = [_asked(precision, each) for each in others]
    return target.holding(recipe, facts, compute=compute, block=block)


def _asked(precision: ResolvedPrecision, weight: SweepWeight) -> tuple[WeightRecipe, NodeInfo]:
    """A weight as passes leave it: its recipe, and what is known of the product that reads it."""
    group, layer, fqn = weight.group, weight.layer, weight.fqn
    name = precision.format(group, layer=layer, fqn=fqn)
    is_stored = name == STORED
    name = weight.stored if is_stored else name
    axis = precision.block_axis if get_format(name).block > 1 and not is_stored else "in"
    segment = Segment(f"{fqn}.weight", math.prod(weight.shape[:-1]))
    family, highest = ALWAYS_HIGH.get(group, (OP_GROUP_OF.get(group), None))
    compute = None
    if family is not None:
        prefill, decode = (
            highest or precision.fidelity(family, phase, layer=layer, fqn=fqn) for phase in PHASES
        )
        compute = Compute(prefill, decode)
    facts = NodeInfo(fqn=fqn, layer=layer, tensor_group=group, op_group=family, compute=compute)
    return WeightRecipe((segment,), weight.shape, name, axis), facts


def swept_model(loaded: CompilableModel, argument: str) -> SweptModel:
    """Take what a sweep must know of a loaded model."""
    return SweptModel(
        argument=argument,
        name=loaded.name,
        content_hash=loaded.checkpoint.content_hash(),
        num_layers=loaded.config.num_layers,
        weights=weights_of(loaded),
        loaded=loaded,
    )


def layer_of(fqn: str) -> int | None:
    """The layer that a module is in."""
    return next((int(part) for part in fqn.split(".") if part.isdigit()), None)
