"""How precise one part of a model is: a part, a level, and a configuration made of such choices.

Knows groups and formats, and nothing of what a choice costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.errors import ConfigError, allowed
from compiler.formats import FIDELITIES, FORMATS
from compiler.precision import OP_GROUP_OF, OP_GROUPS, PrecisionConfig
from compiler.precision.fragment import read_fragment
from compiler.precision.names import ALLOWED_FORMATS, GLOBAL_GROUPS

_MOST_BITS = ((9, "hifi4"), (5, "hifi2"), (0, "lofi"))
"""The fidelity of a format that is named alone, by its bits: what the published grid pairs."""

PRODUCT_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: (family,) if family in OP_GROUPS else (f"{family}_decode", f"{family}_prefill")
    for group, family in OP_GROUP_OF.items()
    if group != "kv_cache"
}
"""The op groups whose fidelity goes with a tensor group's format."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A tensor group, in one layer or (None) wherever it is."""

    group: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.group if self.layer is None else f"{self.layer}.{self.group}"


@dataclass(frozen=True, slots=True)
class Level:
    """A format and the fidelity of the products of weights in it."""

    format: str
    fidelity: str

    def __str__(self) -> str:
        return f"{self.format}:{self.fidelity}"

    @classmethod
    def parse(cls, text: str) -> Level:
        """``bfp8:hifi2``, or ``bfp8`` for the fidelity that usually goes with it.

        Raises:
            ConfigError: for an unknown format or fidelity.
        """
        name, separator, fidelity = text.strip().lower().partition(":")
        if name not in FORMATS:
            raise ConfigError(f"level {text[:40]!r}: unknown format; {allowed(FORMATS)}")
        if not separator:
            bits = FORMATS[name].bits
            fidelity = next(each for least, each in _MOST_BITS if bits >= least)
        if fidelity not in FIDELITIES:
            raise ConfigError(f"level {text[:40]!r}: unknown fidelity; {allowed(FIDELITIES)}")
        return cls(name, fidelity)

    def is_for(self, group: str) -> bool:
        """Whether a tensor group may have this format."""
        return self.format in ALLOWED_FORMATS[group]

    def settings(self, group: str) -> dict[str, dict[str, str]]:
        """The maps that give a group this level."""
        fidelity = dict.fromkeys(PRODUCT_GROUPS.get(group, ()), self.fidelity)
        return {"precision": {group: self.format}, "fidelity": fidelity}


def assign(
    base: PrecisionConfig, choices: Mapping[Part, Level], *, name: str, num_layers: int
) -> PrecisionConfig:
    """``base`` with parts at other levels; a single layer's choice beats one for all layers.

    A part of all layers is written as a rule for them, so that it also holds where the base has
    rules of its own.

    Raises:
        ConfigError: for a base with rules by name, which nothing can override.
    """
    if by_name := next((rule.selector for rule in base.layers if rule.is_glob), None):
        raise ConfigError(
            f"precision {base.name}: has a rule for names, {by_name[:60]!r}; allowed as a base: "
            "rules for layers"
        )
    maps: dict[str, dict[str, str]] = {"precision": {}, "fidelity": {}}
    layers: dict[str, dict[str, dict[str, str]]] = {}
    for part, level in sorted(choices.items(), key=lambda each: each[0].layer is not None):
        target = maps
        if part.group not in GLOBAL_GROUPS:
            selector = f"0-{num_layers - 1}" if part.layer is None else str(part.layer)
            target = layers.setdefault(selector, {"precision": {}, "fidelity": {}})
        for section, values in level.settings(part.group).items():
            target[section] |= values
    fragment = read_fragment({**maps, "layers": layers}, source=name)
    text = ", ".join(f"{part} {level}" for part, level in choices.items())
    description = f"{base.name}, with {text}" if len(text) < 200 else f"{base.name}, changed"
    return PrecisionConfig(name, description, base.name, (*base.fragments, fragment))
