"""YAML for a found configuration, with the reason for every choice in a comment.

The result is parsed again to verify its meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tilewright.compiler.precision import FOLLOWS, OP_GROUP_OF, PHASES, PrecisionConfig
from tilewright.compiler.precision.fragment import Settings
from tilewright.compiler.precision.names import GLOBAL_GROUPS
from tilewright.compiler.precision.phases import compact_settings
from tilewright.evaluate.search.levels import (
    PRODUCT_GROUPS,
    Level,
    SweepUnit,
    chosen_in,
    fidelities_in,
)

Reason = Callable[[SweepUnit], str]
"""Returns a short reason for a unit's level."""

GroupReason = Callable[[str], str]
"""Returns a summary of the levels in a group."""


def usual_levels(levels: Mapping[SweepUnit, Level | None]) -> dict[str, Level | None]:
    """Return the most frequent level in every group.

    None: the base's level. Groups that are not in all layers also have None, and levels by layer.
    """
    groups: dict[str, list[Level | None]] = {}
    for part, level in levels.items():
        groups.setdefault(part.group, []).append(level)
    known = {part.layer for part in levels if part.layer is not None}
    return {
        group: Counter(found).most_common(1)[0][0]
        if SweepUnit(group) in levels or len(found) == len(known)
        else None
        for group, found in groups.items()
    }


def render(
    base: PrecisionConfig,
    levels: Mapping[SweepUnit, Level | None],
    *,
    description: str,
    provenance: Sequence[str],
    reason: Reason,
    group_reason: GroupReason,
) -> str:
    """Return the YAML: provenance as comments, the usual level for every group, and the exceptions.

    Args:
        base: Has a single level for every group.
        levels: All units that could be lowered, with their levels.
    """
    usual = usual_levels(levels)
    lines = [f"# {line}" for line in provenance]
    lines += [f"inherits: {base.name}", f'description: "{description}"', "precision:"]
    lowered = {part.group for part, level in levels.items() if level is not None}
    for group, level in usual.items():
        if level is not None:
            lines += [f"  # {group_reason(group)}", f"  {group}: {level.format}"]
        elif FOLLOWS.get(group) in lowered:
            lines += [
                f"  # not lowered with {FOLLOWS[group]}",
                f"  {group}: {_format(base, group)}",
            ]
    fidelities, by_layer = _fidelities(base, levels)
    lines.append("fidelity:")
    lines += [f"  {key}: {value}" for key, value in fidelities.items()]
    exceptions = {
        part: level
        for part, level in levels.items()
        if part.layer is not None and level != usual[part.group]
    }
    if exceptions or by_layer:
        lines.append("layers:")
        lines += _layers(base, exceptions, reason, by_layer)
    return "\n".join(line for line in _without_empty(lines)) + "\n"


def _layers(
    base: PrecisionConfig,
    exceptions: Mapping[SweepUnit, Level | None],
    reason: Reason,
    fidelities: Mapping[int, Settings],
) -> list[str]:
    """Return the lines for single layers. ``fidelities`` is by layer."""
    lines = []
    for layer in sorted(
        {part.layer for part in exceptions if part.layer is not None}.union(fidelities)
    ):
        lines.append(f"  {layer}:")
        for part, level in exceptions.items():
            if part.layer == layer:
                lines.append(f"    # {part.group}: {reason(part)}")
                chosen = _format(base, part.group) if level is None else level.format
                lines.append(f"    {part.group}: {chosen}")
        lines += [f"    {key}: {value}" for key, value in fidelities.get(layer, {}).items()]
    return lines


def _format(base: PrecisionConfig, group: str) -> str:
    """Return a group's format in a base with equal layers."""
    return base.precision[group if group in base.precision else FOLLOWS[group]]


def _fidelities(
    base: PrecisionConfig, levels: Mapping[SweepUnit, Level | None]
) -> tuple[Settings, dict[int, Settings]]:
    """Return the fidelities that follow the levels.

    The first result has the differences between most layers and the base. The second has, by layer,
    the differences from most layers.
    """
    places: dict[str, list[int]] = {}
    for part in levels:
        places.setdefault(part.group, []).extend([] if part.layer is None else [part.layer])
    lowered = {part: level for part, level in levels.items() if level is not None}
    known = sorted({layer for layers in places.values() for layer in layers})
    usual = base.resolve(known[-1] + 1 if known else 1)
    products = [group for group in places if group in PRODUCT_GROUPS]
    families = {OP_GROUP_OF[group] for group in products if group not in GLOBAL_GROUPS}
    in_base = {
        f"{each}_{phase}": usual.fidelity(each, phase) for each in families for phase in PHASES
    }
    tables = {}
    for layer in known:
        found = fidelities_in(usual, chosen_in(lowered, layer), layer, places)
        tables[layer] = {key: found.get(key, value) for key, value in in_base.items()}
    most = {
        key: Counter(table[key] for table in tables.values()).most_common(1)[0][0]
        for key in sorted(in_base)
    }
    own = {
        key: level.fidelity
        for part, level in lowered.items()
        if part.group in GLOBAL_GROUPS
        for key in PRODUCT_GROUPS[part.group]
    }
    by_layer = {layer: _changed(table, most) for layer, table in tables.items()}
    whole = {**_changed(most, in_base), **own}
    return whole, {layer: changed for layer, changed in by_layer.items() if changed}


def _changed(table: Settings, usual: Settings) -> Settings:
    differing = {key: value for key, value in table.items() if value != usual[key]}
    return dict(sorted(compact_settings(differing).items()))


def _without_empty(lines: Sequence[str]) -> list[str]:
    """Return the lines without empty maps."""
    following = [*lines[1:], ""]
    return [
        line
        for line, after in zip(lines, following, strict=True)
        if line not in ("precision:", "fidelity:") or after.startswith("  ")
    ]
