"""A found configuration as YAML: short, and with the reason for every choice beside it.

The result is read back before it is given away: it must mean what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from compiler.bench.sweep.levels import PRODUCT_GROUPS, Level, Part
from compiler.precision import PrecisionConfig

Reason = Callable[[Part], str]
"""Why a part has its level, in a few words."""

GroupReason = Callable[[str], str]
"""What the levels of a group's parts come to."""


def usual_levels(levels: Mapping[Part, Level | None]) -> dict[str, Level | None]:
    """The level that most parts of each group have; None is the base's."""
    groups: dict[str, list[Level | None]] = {}
    for part, level in levels.items():
        groups.setdefault(part.group, []).append(level)
    return {group: Counter(found).most_common(1)[0][0] for group, found in groups.items()}


def render(
    base: PrecisionConfig,
    levels: Mapping[Part, Level | None],
    *,
    description: str,
    provenance: Sequence[str],
    reason: Reason,
    group_reason: GroupReason,
) -> str:
    """The file: what it was found by as comments, the usual level of each group, the exceptions.

    ``levels`` names every part that could be lowered; ``base`` has one level for each group.
    """
    usual = usual_levels(levels)
    lines = [f"# {line}" for line in provenance]
    lines += [f"inherits: {base.name}", f'description: "{description}"', "precision:"]
    for group, level in usual.items():
        if level is not None:
            lines += [f"  # {group_reason(group)}", f"  {group}: {level.format}"]
    lines.append("fidelity:")
    for group, level in usual.items():
        if level is not None:
            lines += [f"  {key}: {level.fidelity}" for key in PRODUCT_GROUPS.get(group, ())]
    exceptions = {
        part: level
        for part, level in levels.items()
        if part.layer is not None and level != usual[part.group]
    }
    if exceptions:
        lines.append("layers:")
        lines += _layers(base, exceptions, reason)
    return "\n".join(line for line in _without_empty(lines)) + "\n"


def _layers(
    base: PrecisionConfig, exceptions: Mapping[Part, Level | None], reason: Reason
) -> list[str]:
    lines = []
    for layer in sorted({part.layer for part in exceptions if part.layer is not None}):
        lines.append(f"  {layer}:")
        for part, level in exceptions.items():
            if part.layer == layer:
                lines.append(f"    # {part.group}: {reason(part)}")
                lines += [f"    {key}: {value}" for key, value in _settings(base, part, level)]
    return lines


def _settings(base: PrecisionConfig, part: Part, level: Level | None) -> list[tuple[str, str]]:
    keys = PRODUCT_GROUPS.get(part.group, ())
    if level is None:
        fidelity = [(key, base.fidelity[key]) for key in keys]
        return [(part.group, base.precision[part.group]), *fidelity]
    return [(part.group, level.format), *((key, level.fidelity) for key in keys)]


def _without_empty(lines: Sequence[str]) -> list[str]:
    """Maps that nothing stands in are left out."""
    following = [*lines[1:], ""]
    return [
        line
        for line, after in zip(lines, following, strict=True)
        if line not in ("precision:", "fidelity:") or after.startswith("  ")
    ]
