"""Models for plans: weights by group and layer, configurations, and bytes.

Compiles nothing and reads no weights.
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
from tilewright.compiler.targets.interface.base import Target, WeightStorage
from tilewright.compiler.targets.table import get_target


@dataclass(frozen=True, slots=True)
class SweepWeight:
    """A matrix ``[out, in]``, or a stack of expert matrices ``[E, out, in]``.

    Attributes:
        fqn: qualified name of the module.
        shape: size per axis.
        group: tensor group.
        layer: layer number, or None.
        stored: format in the checkpoint.
    """

    fqn: str
    shape: tuple[int, ...]
    group: str
    layer: int | None
    stored: str = "fp32"


@dataclass(frozen=True, slots=True)
class SweptModel:
    """A model in a sweep. ``argument`` is the value of ``--model``."""

    argument: str
    name: str
    content_hash: str
    num_layers: int
    weights: tuple[SweepWeight, ...]
    loaded: CompilableModel

    def resolve(self, precision: PrecisionConfig) -> ResolvedPrecision:
        """Resolve a configuration on this model. Raises ConfigError if it does not fit."""
        return resolve_precision(self.loaded, precision)

    def groups(self) -> list[str]:
        """Return the tensor groups with weights, in model order."""
        return list(dict.fromkeys(weight.group for weight in self.weights))

    def layers(self, group: str) -> list[int]:
        """Return the layers with weights in a group."""
        return sorted({w.layer for w in self.weights if w.group == group and w.layer is not None})

    def places(self) -> dict[str, list[int]]:
        """Return the layers with weights in each group."""
        return {group: self.layers(group) for group in self.groups()}

    def has_calibrated(self, precision: ResolvedPrecision) -> bool:
        """Return whether a calibration has an effect: a matrix with blocks under 8 bits."""
        formats = (
            get_format(precision.format(w.group, layer=w.layer, fqn=w.fqn))
            for w in self.weights
            if w.group != "embedding"
            and precision.format(w.group, layer=w.layer, fqn=w.fqn) != STORED
        )
        return any(f.block > 1 and f.element_bits < EXACT_BITS for f in formats)

    def stored_bytes(
        self, precision: ResolvedPrecision, target: str, compute: str = "fast"
    ) -> dict[tuple[str, int | None, str], int]:
        """Return stored bytes by group, layer and storage.

        Excludes norms and tables.
        """
        backend, blocks = get_target(target), blocks_of(self.weights)
        found: dict[tuple[str, int | None, str], int] = defaultdict(int)
        for weight in self.weights:
            others = blocks.get(weight, ())
            weight_storage = weight_storage_of(weight, precision, backend, compute, others=others)
            found[weight.group, weight.layer, weight_storage.kind] += weight_storage.num_bytes
        return dict(found)


def step_bytes(
    stored: Mapping[tuple[str, int | None, str], int], experts: float = 1.0
) -> dict[str, int]:
    """Return the bytes that a decode step reads, by storage, from `SweptModel.stored_bytes`.

    Excludes the embedding. ``experts``: share of experts in a step.
    """
    found: dict[str, int] = defaultdict(int)
    for (group, _, kind), num_bytes in stored.items():
        if group != "embedding":
            found[kind] += round(num_bytes * (experts if group in EXPERT_GROUPS else 1.0))
    return dict(found)


def experts_share(model: CompilableModel, batch: int) -> float:
    """Return the expected share of experts in a decode step for ``batch`` sequences.

    Assumes equally likely experts. Returns 1 without experts.
    """
    count = getattr(model.config, "num_experts", 0)
    if not count:
        return 1.0
    chosen = int(model.config.experts_per_token)
    return expected_experts(count, batch, chosen) / count


def weights_of(model: CompilableModel) -> tuple[SweepWeight, ...]:
    """Return the weights with a tensor group in model order. Tied weights occur twice."""
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
    """Map each weight in an expert block to the block's other weights."""
    blocks: dict[str, list[SweepWeight]] = defaultdict(list)
    for weight in weights:
        if weight.group in EXPERT_GROUPS:
            blocks[weight.fqn.rpartition(".")[0]].append(weight)
    return {
        weight: tuple(other for other in members if other is not weight)
        for members in blocks.values()
        for weight in members
    }


def weight_storage_of(
    weight: SweepWeight,
    precision: ResolvedPrecision,
    target: Target,
    compute: str,
    *,
    others: Sequence[SweepWeight] = (),
) -> WeightStorage:
    """Return a target's storage for a weight. ``others`` is its expert block (`blocks_of`).

    Raises:
        CompileError: for a weight that the target cannot store.
    """
    recipe, facts = _recipe_of(precision, weight)
    block = [_recipe_of(precision, each) for each in others]
    return target.weight_storage(recipe, facts, compute=compute, block=block)


def _recipe_of(precision: ResolvedPrecision, weight: SweepWeight) -> tuple[WeightRecipe, NodeInfo]:
    """Return a weight's recipe after the passes, and the metadata for its matmul."""
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
    """Return a loaded model for plans."""
    return SweptModel(
        argument=argument,
        name=loaded.name,
        content_hash=loaded.checkpoint.content_hash(),
        num_layers=loaded.config.num_layers,
        weights=weights_of(loaded),
        loaded=loaded,
    )


def layer_of(fqn: str) -> int | None:
    """Return a module's layer, or None."""
    return next((int(part) for part in fqn.split(".") if part.isdigit()), None)
