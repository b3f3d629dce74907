"""Applies a configuration to a model: a format or fidelity for each tensor and op in each layer.

Precedence, weakest first: the base, later sources (model exceptions follow a source's own maps),
layer indices, name patterns. Within a level, the later statement wins.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tilewright.compiler.precision.fragment import Fragment, LayerRule, Settings
from tilewright.compiler.precision.heading import render_heading
from tilewright.compiler.precision.hits import (
    GroupedModule,
    Layers,
    by_layer,
    check_indexed_rules,
    check_pattern,
    reached_keys,
)
from tilewright.compiler.precision.names import (
    CROSS_GROUPS,
    DRAFT_GROUPS,
    DRAFT_SCOPE,
    FOLLOWS,
    GLOBAL_GROUPS,
    PHASES,
    REFINED_OP_GROUPS,
    STORED_OP_GROUPS,
    TENSOR_GROUPS,
    UNSET,
    VISION_GROUPS,
    Phase,
    normalise_model_name,
)
from tilewright.compiler.precision.phases import compact_settings, fold_phases
from tilewright.errors import ConfigError

T = TypeVar("T")

_MATRICES = ("ff1_3", "ff2", "wqkv", "wo", "lm_head")
_KEYS = TENSOR_GROUPS + STORED_OP_GROUPS
_LAYER_KEYS = tuple(key for key in _KEYS if key not in GLOBAL_GROUPS)


class ExplainRow(NamedTuple):
    """A line of ``--explain``: scope, setting, value, and the value's source."""

    scope: str
    key: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class PrecisionSummary:
    """A configuration applied to a model, for records and display."""

    name: str
    id: str
    heading: str
    rows: tuple[ExplainRow, ...]

    def title(self, stored: Sequence[str] = ()) -> str:
        """Return the name and the matrix formats, as in ``stored (Q4_1, Q8_0)``.

        ``stored`` lists the formats in the model's file. They replace the value ``stored``.
        """
        values = [row.value for row in self.rows if row.key in _MATRICES]
        formats = [name for value in values for name in (stored if value == "stored" else [value])]
        names = ", ".join(dict.fromkeys(formats))
        return f"{self.name} ({names})" if names not in ("", self.name) else self.name


class _Set(NamedTuple):
    """A value and its source."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class ResolvedPrecision:
    """The settings for a model with ``num_layers`` layers. ``PrecisionConfig.resolve`` makes it.

    Configurations with equal resolved tables have the same ``id`` and heading.

    Attributes:
        num_layers: Layer count.
        model_name: Name for exceptions by model. None: no exceptions.
        block_axis: ``in`` or ``out``.
        settings: The most common value per group, and the groups outside layers.
        layers: All settings of each layer.
        patterns: Rules by name.
        base: The first fragment in the chain.
        rows: Lines of ``--explain``.
    """

    num_layers: int
    model_name: str | None
    block_axis: str
    settings: Settings
    layers: tuple[Settings, ...]
    patterns: tuple[LayerRule, ...]
    base: Fragment
    rows: tuple[ExplainRow, ...]

    def format(self, group: str, *, layer: int | None = None, fqn: str | None = None) -> str:
        """Return a tensor group's format, for a layer and a qualified name.

        An unset group in ``FOLLOWS`` has its leader's format. ``activation`` may be ``mixed``:
        see :func:`output_format`. An unset ``block_output`` is ``mixed``.
        """
        assert group in TENSOR_GROUPS, f"no tensor group {group!r}"
        follows = group in FOLLOWS and group not in self.settings
        return self._look_up((group, FOLLOWS[group]) if follows else (group,), layer, fqn)

    def fidelity(
        self, op_group: str, phase: Phase, *, layer: int | None = None, fqn: str | None = None
    ) -> str:
        """Return the fidelity of an op group (``li_qkv`` or ``li_qkv_decode``) in a phase."""
        assert phase in PHASES, f"no phase {phase!r}"
        has_phase = op_group in GLOBAL_GROUPS or op_group.endswith(f"_{phase}")
        key = op_group if has_phase else f"{op_group}_{phase}"
        assert key in STORED_OP_GROUPS, f"no op group {op_group!r} in {phase}"
        return self._look_up((key,), layer, fqn)

    def heading(self) -> str:
        """Return the canonical line. For the same layer count, it parses to equal settings."""
        return render_heading(
            self.settings,
            self.base.settings,
            rules=(*self._layer_rules(), *self.patterns),
            block_axis=None if self.block_axis == self.base.block_axis else self.block_axis,
        )

    @property
    def id(self) -> str:
        """Return a short hash of the settings. Spelling does not change it."""
        rules = (*self._layer_rules(), *self.patterns)
        return effective_id(
            {
                "block_axis": self.block_axis,
                "settings": compact_settings(self.settings),
                "rules": [[rule.selector, compact_settings(rule.settings)] for rule in rules],
            }
        )

    def explain(self) -> tuple[ExplainRow, ...]:
        """Return every configured setting with its source: global, layers, patterns."""
        return self.rows

    def summary(self, name: str) -> PrecisionSummary:
        """Return the summary for a compiled model. ``name`` is the configuration's name."""
        return PrecisionSummary(name, self.id, self.heading(), self.rows)

    def _look_up(self, keys: Sequence[str], layer: int | None, fqn: str | None) -> str:
        if fqn is not None:
            matching = [rule.settings for rule in reversed(self.patterns) if rule.matches(fqn)]
            for key in keys:
                for settings in matching:
                    if key in settings:
                        return settings[key]
        if layer is not None:
            assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
            if keys[0] in self.layers[layer]:
                return self.layers[layer][keys[0]]
        return self.settings.get(keys[-1]) or UNSET[keys[-1]]

    def _layer_rules(self) -> Iterator[LayerRule]:
        def differences(layer: int) -> dict[str, str]:
            return {
                key: self.layers[layer][key]
                for key in _LAYER_KEYS
                if key in self.settings and self.layers[layer][key] != self.settings[key]
            }

        for first, last, changed in _runs(self.num_layers, differences):
            if changed:
                yield LayerRule(_selector(first, last), MappingProxyType(changed), first, last)


def effective_id(mapping: Mapping[str, object]) -> str:
    """Return twelve hex digits of the SHA-256 over a mapping's canonical JSON (sorted keys)."""
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve_fragments(
    fragments: Sequence[Fragment],
    *,
    num_layers: int,
    model_name: str | None,
    modules: Iterable[GroupedModule],
) -> ResolvedPrecision:
    """Apply a fragment chain, the base first, to a model.

    If ``modules`` are given, layer settings without a module are dropped. Otherwise each layer
    counts as having all groups.

    Raises:
        ConfigError: A layer does not exist, or a rule matches no module.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers = {num_layers}; allowed: 1 or more")
    scopes = list(_scopes(fragments, model_name))
    table: dict[str, _Set] = {}
    for scope in scopes:
        table |= {key: _Set(value, scope.source) for key, value in scope.settings.items()}
    optional = {*FOLLOWS, *UNSET}
    assert all(key in table for key in _KEYS if key not in optional), "the base is incomplete"
    overrides = _index_overrides(scopes, num_layers)
    in_layers = by_layer(modules)
    if in_layers:
        check_indexed_rules(scopes, in_layers, num_layers)
        overrides = _effective(table, overrides, in_layers)
    patterns = [
        (rule, s.source) for s in scopes for rule in s.rules if rule.is_glob and rule.settings
    ]
    layers = [_layer_table(table, overrides[layer]) for layer in range(num_layers)]
    kept = _kept(table, overrides, layers, has_patterns=bool(patterns))
    for rule, source in patterns if in_layers else ():
        check_pattern(source, rule, in_layers, kept)
    settings = {key: table[key].value for key in GLOBAL_GROUPS}
    settings |= _usual(layers, kept, in_layers)
    axes = [_Set(s.block_axis, s.source) for s in scopes if s.block_axis is not None]
    return ResolvedPrecision(
        num_layers=num_layers,
        model_name=model_name,
        block_axis=axes[-1].value,
        settings=MappingProxyType(settings),
        layers=tuple(MappingProxyType(layer) for layer in layers),
        patterns=tuple(rule for rule, _ in patterns),
        base=fragments[0],
        rows=tuple(_explain(table, overrides, patterns, axes[-1], present=_present(in_layers))),
    )


def _scopes(fragments: Sequence[Fragment], model_name: str | None) -> Iterator[Fragment]:
    name = None if model_name is None else normalise_model_name(model_name)
    for fragment in fragments:
        yield fragment
        if name is not None and name in fragment.models:
            yield fragment.models[name]


def _index_overrides(scopes: Iterable[Fragment], num_layers: int) -> list[dict[str, _Set]]:
    overrides: list[dict[str, _Set]] = [{} for _ in range(num_layers)]
    for scope in scopes:
        for rule in scope.rules:
            if rule.first is None or rule.last is None:
                continue
            if rule.last >= num_layers:
                raise ConfigError(
                    f"{scope.source}: layers.{rule.selector}: the model has {num_layers} layers;"
                    f" allowed: 0 to {num_layers - 1}"
                )
            changed = {key: _Set(value, scope.source) for key, value in rule.settings.items()}
            for layer in range(rule.first, rule.last + 1):
                overrides[layer] |= changed
    return overrides


def _effective(
    table: Mapping[str, _Set], overrides: Iterable[Mapping[str, _Set]], in_layers: Layers
) -> list[dict[str, _Set]]:
    """Return the settings per layer with an effect on modules."""
    found = []
    for layer, override in enumerate(overrides):
        reached = reached_keys(in_layers.get(layer, ()), table.keys() | override.keys())
        found.append({key: entry for key, entry in override.items() if key in reached})
    return found


def _usual(
    layers: Sequence[dict[str, str]], kept: Sequence[str], in_layers: Layers
) -> dict[str, str]:
    """Return the most common value of each group over the layers with the group.

    Set the value in the remaining ``layers`` too, so that they need no rule.
    """
    reached = [reached_keys(in_layers.get(layer, ()), kept) for layer in range(len(layers))]
    usual = {}
    for key in kept:
        owners = [each for each, keys in zip(layers, reached, strict=True) if key in keys]
        usual[key] = _most_common(layer[key] for layer in owners or layers)
        for layer, keys in zip(layers, reached, strict=True):
            if in_layers and key not in keys:
                layer[key] = usual[key]
    return usual


def _layer_table(table: Mapping[str, _Set], override: Mapping[str, _Set]) -> dict[str, str]:
    merged = {**table, **override}
    values = {key: merged[key].value for key in _LAYER_KEYS if key in merged}
    for follower, leader in FOLLOWS.items():
        values.setdefault(follower, merged[leader].value)
    return UNSET | values


def _kept(
    table: Mapping[str, _Set],
    overrides: Sequence[Mapping[str, _Set]],
    layers: Sequence[Mapping[str, str]],
    *,
    has_patterns: bool,
) -> tuple[str, ...]:
    """Return the layer groups with their own settings.

    Groups equal to their leader and groups with the unset value are excluded.
    """

    def follows(follower: str, leader: str) -> bool:
        if follower not in table and not any(follower in override for override in overrides):
            return True
        # The group is set to its leader's value. A later pattern may change the leader only.
        return not has_patterns and all(
            layer[follower] == layer.get(leader, table[leader].value) for layer in layers
        )

    left = {each for each, leader in FOLLOWS.items() if follows(each, leader)}
    left |= {key for key, unset in UNSET.items() if all(each[key] == unset for each in layers)}
    return tuple(key for key in _LAYER_KEYS if key not in left)


def _most_common(values: Iterable[str]) -> str:
    # Counter preserves first-seen order for ties, so the lowest layer decides.
    return Counter(values).most_common(1)[0][0]


def _explain(
    table: Mapping[str, _Set],
    overrides: Sequence[Mapping[str, _Set]],
    patterns: Iterable[tuple[LayerRule, str]],
    axis: _Set,
    *,
    present: Collection[str],
) -> Iterator[ExplainRow]:
    for key, entry in _rows_of(table):
        scope = "model" if key in GLOBAL_GROUPS else "all layers"
        yield ExplainRow(scope, key, *entry)
        yield from _followers(scope, key, entry.value, table.keys(), present)
    yield ExplainRow("model", "block_axis", *axis)
    for first, last, changed in _runs(len(overrides), lambda layer: dict(overrides[layer])):
        scope = f"layer {first}" if first == last else f"layers {first}-{last}"
        for key, entry in _rows_of(changed):
            yield ExplainRow(scope, key, *entry)
            yield from _followers(scope, key, entry.value, table.keys() | changed.keys(), present)
    for rule, source in patterns:
        settings = {key: _Set(value, source) for key, value in rule.settings.items()}
        for key, entry in _rows_of(settings):
            yield ExplainRow(rule.selector, key, *entry)


def _present(in_layers: Layers) -> Collection[str]:
    """Return the groups of the model's modules, or all groups without modules.

    A draft layer has its own modules, so its groups are always included.
    """
    modules = [module for each in in_layers.values() for module in each]
    return {*reached_keys(modules, TENSOR_GROUPS), *DRAFT_GROUPS} if modules else TENSOR_GROUPS


def _followers(
    scope: str, key: str, value: str, configured: Collection[str], present: Collection[str]
) -> Iterator[ExplainRow]:
    """Yield a row per group in ``present`` that follows ``key`` and is not ``configured``."""
    outside = dict.fromkeys((*VISION_GROUPS, *CROSS_GROUPS), "model")
    outside |= dict.fromkeys(DRAFT_GROUPS, DRAFT_SCOPE)
    for follower, leader in FOLLOWS.items():
        if leader != key or follower in configured or follower not in present:
            continue
        if follower not in outside:
            yield ExplainRow(scope, follower, value, f"as {key}")
        elif not scope.startswith("layer"):
            yield ExplainRow(outside[follower], follower, value, f"as {key}")


def _rows_of(settings: Mapping[str, _Set]) -> Iterator[tuple[str, _Set]]:
    folded = fold_phases(settings)
    order = TENSOR_GROUPS + tuple(REFINED_OP_GROUPS) + STORED_OP_GROUPS
    return ((key, folded[key]) for key in order if key in folded)


def _runs(
    num_layers: int, value_of: Callable[[int], dict[str, T]]
) -> Iterator[tuple[int, int, dict[str, T]]]:
    """Yield the first layer, last layer and value of each run of layers with equal values."""
    for value, run in groupby(range(num_layers), key=value_of):
        stretch = list(run)
        yield stretch[0], stretch[-1], value


def _selector(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
