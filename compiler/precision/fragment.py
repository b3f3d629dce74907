"""A checked part of a configuration from one source (a file or a heading), in canonical spelling.

Settings are stored by phase: ``li_ff1_3`` becomes its prefill and decode entries, so later code
sees a single spelling. This file reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

from tilewright.compiler.precision.names import (
    BLOCK_AXES,
    GLOBAL_GROUPS,
    OP_GROUPS,
    TENSOR_GROUPS,
    check_setting,
    normalise_key,
    normalise_model_name,
    normalise_value,
)
from tilewright.compiler.precision.phases import expand_phases
from tilewright.errors import ConfigError, allowed

Settings: TypeAlias = Mapping[str, str]
NO_SETTINGS: Settings = MappingProxyType({})

_MAPS = {"precision": TENSOR_GROUPS, "fidelity": OP_GROUPS}
FRAGMENT_KEYS = (*_MAPS, "layers", "models", "block_axis")
MAX_MODEL_RULES = 4096
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_GLOB = re.compile(r"[A-Za-z0-9_.*?\[\]!-]{1,200}")


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Settings for a layer range or for modules by name.

    Attributes:
        selector: The text in the source: an index, a range or a glob.
        settings: Values by group and phase.
        first: First layer. None for a glob.
        last: Last layer, inclusive. None for a glob.
    """

    selector: str
    settings: Settings
    first: int | None = None
    last: int | None = None

    @property
    def is_glob(self) -> bool:
        """Return whether the rule selects modules by qualified name instead of layer index."""
        return self.first is None

    @property
    def indices(self) -> range:
        """Return an index rule's layers. A glob has none."""
        return (
            range(0)
            if self.first is None or self.last is None
            else range(self.first, self.last + 1)
        )

    def matches(self, fqn: str) -> bool:
        """Return whether a glob matches the module ``fqn`` or a module around it."""
        names = accumulate(fqn.split("."), "{}.{}".format)
        return self.is_glob and any(fnmatchcase(name, self.selector) for name in names)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Settings and rules from one source.

    Attributes:
        source: File name or ``heading``, for error messages.
        settings: Values by group and phase.
        rules: Rules by layer or name, weakest first.
        models: Exceptions by normalized model name.
        block_axis: ``in``, ``out``, or None if the source does not set it.
        is_table: Layer rules list the same groups in every layer, even if the model does not have
            them
            there. If False, each setting of a rule must have an effect in at least one layer.
    """

    source: str
    settings: Settings = field(default_factory=lambda: NO_SETTINGS)
    rules: tuple[LayerRule, ...] = ()
    models: Mapping[str, Fragment] = field(default_factory=lambda: MappingProxyType({}))
    block_axis: str | None = None
    is_table: bool = False


def read_fragment(raw: Mapping[str, object], *, source: str) -> Fragment:
    """Check the maps of a parsed file or heading: ``precision``, ``fidelity``, ``layers``,
    ``models``, ``block_axis``.

    Raises:
        ConfigError: A key, value, selector or model name is not allowed.
    """
    check_keys(raw, FRAGMENT_KEYS, where=source)
    models: dict[str, Fragment] = {}
    num_rules = 0
    for name, entry in as_map(raw.get("models", {}), where=f"{source}: models").items():
        where = f"{source}: models.{name}"
        entry = as_map(entry, where=where)
        check_keys(entry, (*_MAPS, "layers"), where=where)
        canonical = normalise_model_name(name)
        if canonical in models:
            raise ConfigError(f"{where}: this model is listed twice; allowed: once")
        models[canonical] = Fragment(
            source=f"{source} models.{name}",
            settings=_read_maps(entry, where=where),
            rules=_read_rules(entry.get("layers", {}), where=where),
        )
        # YAML aliases can repeat a layer map for many models.
        num_rules += len(models[canonical].rules)
        if num_rules > MAX_MODEL_RULES:
            raise ConfigError(
                f"{where}: too many layer rules; allowed: {MAX_MODEL_RULES} over all models"
            )
    return Fragment(
        source=source,
        settings=_read_maps(raw, where=source),
        rules=_read_rules(raw.get("layers", {}), where=source),
        models=MappingProxyType(models),
        block_axis=_read_block_axis(raw, where=source),
    )


def read_settings(raw: object, *, groups: Iterable[str], where: str) -> Settings:
    """Check a flat map from groups to values. Return canonical names with an entry per phase.

    Raises:
        ConfigError: A group is unknown or repeated, or its value is not allowed.
    """
    groups = tuple(groups)
    given: dict[str, str] = {}
    for raw_key, value in as_map(raw, where=where).items():
        key = normalise_key(raw_key)
        if key not in groups:
            raise ConfigError(f"{where}: unknown key {raw_key!r}; {allowed(groups, key)}")
        if key in given:
            raise ConfigError(f"{where}: {key} is given twice; allowed: once")
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} has a {type(value).__name__}; allowed: a name")
        given[key] = normalise_value(value)
        check_setting(key, given[key], where=where)
    return MappingProxyType(expand_phases(given))


def read_rule(selector: object, raw: object, *, where: str) -> LayerRule:
    """Check an entry of ``layers``: ``31``, ``0-3`` or a glob, with nested or flat settings.

    Raises:
        ConfigError: The selector has another form, or a setting is not allowed.
    """
    selector = str(selector).strip() if isinstance(selector, str | int) else ""
    where = f"{where}: layers.{selector}"
    entry = as_map(raw, where=where)
    nested = {key: entry[key] for key in _MAPS if key in entry}
    flat = {key: value for key, value in entry.items() if key not in _MAPS}
    if nested and flat:
        raise ConfigError(f"{where}: two spellings at once; {allowed((*_MAPS, 'or plain groups'))}")
    settings = {
        **_read_maps(nested, where=where),
        **read_settings(flat, groups=TENSOR_GROUPS + OP_GROUPS, where=where),
    }
    if match := _RANGE.fullmatch(selector):
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{where}: the range is empty; allowed: first-last, first <= last")
        for key in GLOBAL_GROUPS:
            if key in settings:
                raise ConfigError(f"{where}: {key} is in no layer; allowed: it in the global maps")
        return LayerRule(selector, MappingProxyType(settings), first, last)
    # A glob has a letter or a wildcard. A mistyped range is then an error and not a name.
    if not _GLOB.fullmatch(selector) or not re.search(r"[A-Za-z*?]", selector):
        raise ConfigError(
            f"{where}: not a layer; allowed: an index (31), a range (0-3), a pattern of names"
            " (*.mlp.down_proj)"
        )
    return LayerRule(selector, MappingProxyType(settings))


def check_keys(raw: Mapping[str, object], known: Iterable[str], *, where: str) -> None:
    """Raise ConfigError for a key outside ``known``. The message lists the known keys."""
    for key in raw:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {allowed(known, key)}")


def as_map(raw: object, *, where: str) -> Mapping[str, object]:
    """Return ``raw`` if it is a map with string keys. An empty value is an empty map.

    Raises:
        ConfigError: ``raw`` has another type.
    """
    if raw is None or raw == "":
        return {}
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        kind = type(raw).__name__
        raise ConfigError(f"{where}: a {kind}; allowed: a map from names to values")
    return raw


def _read_maps(raw: Mapping[str, object], *, where: str) -> Settings:
    settings: dict[str, str] = {}
    for name, groups in _MAPS.items():
        settings |= read_settings(raw.get(name, {}), groups=groups, where=f"{where}: {name}")
    return MappingProxyType(settings)


def _read_rules(raw: object, *, where: str) -> tuple[LayerRule, ...]:
    entries = as_map(raw, where=f"{where}: layers").items()
    return tuple(read_rule(selector, entry, where=where) for selector, entry in entries)


def _read_block_axis(raw: Mapping[str, object], *, where: str) -> str | None:
    if "block_axis" not in raw:
        return None
    value = raw["block_axis"]
    if value not in BLOCK_AXES:
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise ConfigError(f"{where}: block_axis = {shown}; {allowed(BLOCK_AXES)}")
    return str(value)
