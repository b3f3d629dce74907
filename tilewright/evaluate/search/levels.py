"""Units and levels in a precision search, and configurations made from such choices.

Excludes a choice's cost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.compiler.formats import FIDELITIES, FORMATS
from tilewright.compiler.precision import (
    FOLLOWS,
    OP_GROUP_OF,
    OP_GROUPS,
    PHASES,
    PrecisionConfig,
    ResolvedPrecision,
)
from tilewright.compiler.precision.fragment import read_fragment
from tilewright.compiler.precision.names import ALLOWED_FORMATS, DRAFT_GROUPS, GLOBAL_GROUPS
from tilewright.errors import ConfigError, allowed

_MOST_BITS = ((9, "hifi4"), (5, "hifi2"), (0, "lofi"))
"""Default fidelity by the number of bits in a format, as in the published grid."""

_LEVELS = tuple(name for name in FORMATS if FORMATS[name].is_offered)

PRODUCT_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: (family,) if family in OP_GROUPS else (f"{family}_decode", f"{family}_prefill")
    for group, family in OP_GROUP_OF.items()
    if not group.endswith("kv_cache") and group not in DRAFT_GROUPS
}
"""Op groups whose fidelity follows a tensor group's format. Drafts do not change results."""

Places = Mapping[str, Collection[int]]
"""Tensor groups in a model, with the layers that have their weights."""

NO_PLACES: Places = MappingProxyType({})


@dataclass(frozen=True, slots=True, order=True)
class SweepUnit:
    """A tensor group in one layer. Layer None: in all layers."""

    group: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.group if self.layer is None else f"{self.layer}.{self.group}"


@dataclass(frozen=True, slots=True)
class Level:
    """A format, and the fidelity for matmuls with weights in this format."""

    format: str
    fidelity: str

    def __str__(self) -> str:
        return f"{self.format}:{self.fidelity}"

    @classmethod
    def parse(cls, text: str) -> Level:
        """Parse ``bfp8:hifi2``, or ``bfp8`` with its default fidelity.

        Raises:
            ConfigError: The format or fidelity is unknown.
        """
        name, separator, fidelity = text.strip().lower().partition(":")
        if name not in _LEVELS:
            raise ConfigError(f"level {text[:40]!r}: unknown format; {allowed(_LEVELS, name)}")
        if not separator:
            bits = FORMATS[name].bits
            fidelity = next(each for least, each in _MOST_BITS if bits >= least)
        if fidelity not in FIDELITIES:
            raise ConfigError(
                f"level {text[:40]!r}: unknown fidelity; {allowed(FIDELITIES, fidelity)}"
            )
        return cls(name, fidelity)

    def is_for(self, group: str) -> bool:
        """Return whether a tensor group supports this format."""
        return self.format in ALLOWED_FORMATS[group]

    def settings(self, group: str) -> dict[str, dict[str, str]]:
        """Return the configuration maps that assign this level to a group."""
        fidelity = dict.fromkeys(PRODUCT_GROUPS.get(group, ()), self.fidelity)
        return {"precision": {group: self.format}, "fidelity": fidelity}


def rank(fidelity: str) -> tuple[int, bool, bool, bool, bool]:
    """Return a fidelity's sort key: phases, then its sums' precision."""
    each = FIDELITIES[fidelity]
    exact = each.fp32_outputs, each.fp32_dest, each.packer_l1_acc, not each.approx
    return each.num_phases, *exact


def assign(
    base: PrecisionConfig,
    choices: Mapping[SweepUnit, Level],
    *,
    name: str,
    num_layers: int,
    groups: Places = NO_PLACES,
    model_name: str | None = None,
) -> PrecisionConfig:
    """Return ``base`` with different levels for some units. A choice for a layer precedes a choice
    for all.

    Choices in layers become rules for layers, and so override rules in the base. No further unit is
    lowered: groups that would follow a choice keep their format. If groups share matmuls, the
    highest fidelity applies.

    Args:
        groups: Groups in the model. Empty: only the chosen groups are known.
        model_name: Model for the exceptions in the base.

    Raises:
        ConfigError: The base has rules by name, which choices cannot override.
    """
    if by_name := next((rule.selector for rule in base.layers if rule.is_glob), None):
        raise ConfigError(
            f"precision {base.name}: has a rule for names, {by_name[:60]!r}; allowed as a base: "
            "rules for layers"
        )
    maps: dict[str, dict[str, str]] = {"precision": {}, "fidelity": {}}
    for part, level in choices.items():
        if part.group in GLOBAL_GROUPS:
            for section, values in level.settings(part.group).items():
                maps[section] |= values
    usual = base.resolve(num_layers, model_name)
    named = {part.layer for part in choices if part.layer is not None}
    layers = {}
    for layer in sorted(named.union(range(num_layers))):
        if chosen := chosen_in(choices, layer):
            kept = _kept_formats(usual, chosen, layer, groups)
            layers[str(layer)] = {
                "precision": kept | {group: level.format for group, level in chosen.items()},
                "fidelity": fidelities_in(usual, chosen, layer, groups),
            }
    fragment = replace(read_fragment({**maps, "layers": layers}, source=name), is_table=True)
    text = ", ".join(f"{part} {level}" for part, level in choices.items())
    description = f"{base.name}, with {text}" if len(text) < 200 else f"{base.name}, changed"
    return PrecisionConfig(name, description, base.name, (*base.fragments, fragment))


def chosen_in(choices: Mapping[SweepUnit, Level], layer: int) -> dict[str, Level]:
    """Return the chosen levels for the groups in a layer."""
    found = {}
    for part, level in sorted(choices.items(), key=lambda each: each[0].layer is not None):
        if part.group not in GLOBAL_GROUPS and part.layer in (None, layer):
            found[part.group] = level
    return found


def fidelities_in(
    usual: ResolvedPrecision, chosen: Mapping[str, Level], layer: int, groups: Places
) -> dict[str, str]:
    """Return the fidelities for a layer's matmuls with ``chosen`` groups, by op group and phase.

    For shared matmuls, groups that are not chosen count with their fidelity in ``usual``.
    """
    found = {}
    for family in dict.fromkeys(OP_GROUP_OF[g] for g in chosen if g in PRODUCT_GROUPS):
        here = [g for g, layers in groups.items() if layer in layers] if groups else list(chosen)
        sharing = [group for group in here if OP_GROUP_OF.get(group) == family]
        for phase in PHASES if sharing else ():
            levels = [
                chosen[group].fidelity
                if group in chosen
                else usual.fidelity(family, phase, layer=layer)
                for group in sharing
            ]
            found[f"{family}_{phase}"] = max(levels, key=rank)
    return found


def _kept_formats(
    usual: ResolvedPrecision, chosen: Mapping[str, Level], layer: int, groups: Places
) -> dict[str, str]:
    """Return the base formats for a layer's groups that would follow a chosen group."""
    return {
        follower: usual.format(follower, layer=layer)
        for follower, leader in FOLLOWS.items()
        if layer in groups.get(follower, ()) and leader in chosen and follower not in chosen
    }
