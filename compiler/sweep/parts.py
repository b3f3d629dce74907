"""What each part of a model costs and wins at each level, from measurements and the cost model.

A single part's loss is measured at one level; at another it has its share of what its whole group
was measured to lose there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.compiler.sweep.cost_model import CostModel
from tilewright.compiler.sweep.levels import PRODUCT_GROUPS, Level, Part
from tilewright.compiler.sweep.model import SweptModel
from tilewright.compiler.sweep.search import BASE_OPTION, Item, Option, shares
from tilewright.compiler.sweep.sensitivity import Sensitivity

Held = Mapping[tuple[str, int | None, str], int]
"""Bytes by group, layer and kind of holding."""


def single_parts(model: SweptModel) -> list[Part]:
    """Every group of every layer, and the head: what a search chooses levels for."""
    found = []
    for group in model.groups():
        if group in PRODUCT_GROUPS:
            layers = model.layers(group)
            found += [Part(group, layer) for layer in layers] if layers else [Part(group)]
    return found


def make_items(
    parts: Sequence[Part],
    sensitivity: Sensitivity,
    group_losses: Mapping[tuple[str, Level], float],
    held: Mapping[Level | None, Held],
    cost_model: CostModel,
) -> list[Item]:
    """Each part with an option for every level.

    Args:
        group_losses: KL lost with a whole group at a level.
        held: the model's weights as held with everything at a level; None is the base.
    """
    share = _shares(parts, sensitivity)
    items = []
    for part in parts:
        options = [BASE_OPTION]
        for level in (level for level in held if level is not None):
            loss = group_losses.get((part.group, level))
            before, after = _of(held[None], part), _of(held[level], part)
            if loss is None or not (cost_model.knows(before) and cost_model.knows(after)):
                continue
            saved = cost_model.predict(before) - cost_model.predict(after)
            bytes_saved = sum(before.values()) - sum(after.values())
            options.append(Option(level, max(loss, 0.0) * share[part], saved, bytes_saved))
        items.append(Item(part, tuple(options)))
    return items


def groups_without_shares(parts: Sequence[Part], sensitivity: Sensitivity) -> list[str]:
    """The groups of which some single layer was not measured."""
    missing = [part.group for part in parts if sensitivity.find(str(part)) is None]
    return list(dict.fromkeys(missing))


def _shares(parts: Sequence[Part], sensitivity: Sensitivity) -> dict[Part, float]:
    """Of its group's loss, by single layers where they were measured; else equal ones."""
    found: dict[Part, float] = {}
    for group in dict.fromkeys(part.group for part in parts):
        members = [part for part in parts if part.group == group]
        lowered = {part: sensitivity.find(str(part)) for part in members}
        losses = {part: each.kl_lost for part, each in lowered.items() if each is not None}
        errors = {part: each.kl_error for part, each in lowered.items() if each is not None}
        if len(losses) == len(members):
            found |= shares(losses, errors)
        else:
            found |= dict.fromkeys(members, 1 / len(members))
    return found


def _of(held: Held, part: Part) -> dict[str, int]:
    """A part's bytes by kind."""
    return {
        kind: size
        for (group, layer, kind), size in held.items()
        if group == part.group and layer == part.layer
    }
