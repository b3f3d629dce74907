"""Matches settings with a model's modules, and rejects layer rules without an effect.

Modules are names with a layer and a tensor group. ``resolve`` interprets the settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from tilewright.compiler.precision.fragment import Fragment, LayerRule
from tilewright.compiler.precision.names import (
    ALWAYS_HIGH,
    BLOCK_OUTPUTS,
    FOLLOWS,
    OP_GROUP_OF,
    VALUE_CACHE,
)
from tilewright.compiler.precision.phases import fold_phases, stored_op_groups
from tilewright.errors import ConfigError, allowed

_NUM_EXAMPLES = 3


class GroupedModule(NamedTuple):
    """A module with a weight or cache in a tensor group. ``layer`` is None outside layers."""

    fqn: str
    group: str
    layer: int | None


Layers = Mapping[int | None, Sequence[GroupedModule]]
"""The modules of each layer. None has the modules outside layers."""


def by_layer(modules: Iterable[GroupedModule]) -> Layers:
    """Group modules by layer, in their order."""
    layers: dict[int | None, list[GroupedModule]] = {}
    for module in modules:
        layers.setdefault(module.layer, []).append(module)
    return layers


def reached_keys(modules: Iterable[GroupedModule], apart: Collection[str]) -> set[str]:
    """Return the settings, by phase, with an effect on any of ``modules``.

    ``apart`` contains the explicitly set groups of ``FOLLOWS``. They follow no other group.
    """
    keys: set[str] = set()
    for group in {module.group for module in modules}:
        keys.add(group)
        if group == FOLLOWS[VALUE_CACHE]:
            keys.add(VALUE_CACHE)
        if group in FOLLOWS and group not in apart:
            keys.add(FOLLOWS[group])
        if group in OP_GROUP_OF or group in ALWAYS_HIGH:
            keys.add("activation")
        if group in BLOCK_OUTPUTS:
            keys.add("block_output")
        keys.update(stored_op_groups(OP_GROUP_OF.get(group, "")))
    return keys


def check_indexed_rules(scopes: Iterable[Fragment], layers: Layers, num_layers: int) -> None:
    """Reject index rules without an effect on the model.

    Each setting must affect a layer in its rule. In a table source, it must affect a layer in any
    rule.

    Raises:
        ConfigError: A setting has no effect. The message lists modules with an effect.
    """
    known = set[str]()
    stated = [set[str]() for _ in range(num_layers)]
    for scope in scopes:
        known |= scope.settings.keys()
        rules = [rule for rule in scope.rules if not rule.is_glob]
        for rule in rules:
            for layer in rule.indices:
                stated[layer] |= rule.settings.keys()
        reached = [reached_keys(layers.get(n, ()), known | stated[n]) for n in range(num_layers)]
        hits = [set[str]().union(*(reached[layer] for layer in rule.indices)) for rule in rules]
        everywhere = set[str]().union(*hits) if scope.is_table else set[str]()
        for rule, keys in zip(rules, hits, strict=True):
            if without := [key for key in rule.settings if key not in keys | everywhere]:
                _refuse(scope.source, rule, without, keys, layers)


def check_pattern(source: str, rule: LayerRule, layers: Layers, apart: Collection[str]) -> None:
    """Reject a glob rule with a setting that affects no module.

    Raises:
        ConfigError: A setting has no effect. The message lists modules with an effect.
    """
    every = [module for modules in layers.values() for module in modules]
    named = [module for module in every if rule.matches(module.fqn)]
    if not named:
        raise ConfigError(
            f"{source}: layers.{rule.selector}: matches no name of the model;"
            f" allowed: patterns of names such as {_closest(rule.selector, every)}"
        )
    reached = reached_keys(named, {*apart, *rule.settings})
    if without := [key for key in rule.settings if key not in reached]:
        _refuse(source, rule, without, reached, layers)


def _closest(selector: str, modules: Sequence[GroupedModule]) -> str:
    """Return the module name closest to a pattern without a match."""
    names = [module.fqn for module in modules]
    plain = selector.replace("*", "").strip(".").lower()
    parts = [".".join(name.split(".")[-1 - plain.count(".") :]) for name in names]
    close = get_close_matches(plain, parts, n=1)
    return names[parts.index(close[0])] if close else names[-1]


def _refuse(
    source: str, rule: LayerRule, without: Sequence[str], reached: set[str], layers: Layers
) -> None:
    """Raise ConfigError for a rule. Settings in ``without`` have no effect, settings in ``reached``
    do.
    """
    key = next(iter(fold_phases(dict.fromkeys(without, ""))))
    every = (module for modules in layers.values() for module in modules)
    owners = [module.fqn for module in every if without[0] in reached_keys([module], ())]
    more = ", ..." if len(owners) > _NUM_EXAMPLES else ""
    elsewhere = f"of {', '.join(owners[:_NUM_EXAMPLES])}{more}" if owners else "in no module of it"
    can_be_set = sorted(fold_phases(dict.fromkeys(reached, ""))) or ["nothing"]
    raise ConfigError(
        f"{source}: layers.{rule.selector}: {key} has no effect on this model's modules there"
        f" ({key} is {elsewhere}); {allowed(can_be_set)}"
    )
