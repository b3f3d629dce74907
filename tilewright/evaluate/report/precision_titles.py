"""Configuration titles in PERF.md, written and read back.

A title is the heading. Long rules for layers are replaced by the configuration's name, with a link
if the configuration ships.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.compiler.precision import (
    PrecisionConfig,
    list_precisions,
    load_precision,
    parse_heading,
)
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.perf_md import Section
from tilewright.evaluate.results.record import Result

_FOLDER = "precision_cfgs"
_LAYERS = re.compile(r", layer_cfg = (.+?)((?:, block_axis = \w+)?)$")
_LINK = re.compile(rf"\[([^\[\]]+)\]\((?:[^()]*/)?({_FOLDER}/\1\.yaml)\)")
_LAST_LAYER = re.compile(r"(?<![^{ -])([0-9]{1,6}): \{")
_MAX_LAYERS, _MAX_TRIED = 1000, 128


def titles_of(results: Sequence[Result]) -> dict[str, str]:
    """Return a title per heading. A name that ships is preferred."""
    has_layers = any(_LAYERS.search(result.heading) for result in results)
    shipped = list_precisions() if has_layers else {}
    found: dict[str, str] = {}
    for result in sorted(
        results, key=lambda r: (r.precision_name not in shipped, r.precision_name)
    ):
        if result.heading not in found:
            found[result.heading] = _title(result, is_shipped=result.precision_name in shipped)
    return found


def section_precision(section: Section) -> PrecisionConfig:
    """Return the configuration for a section "performance", "accuracy" or "precision".

    Raises:
        ConfigError: for a malformed heading, or a configuration that does not ship.
    """
    assert section.kind in ("performance", "accuracy", "precision"), section.kind
    if section.kind != "precision":
        return load_precision(section.kind)
    layers = _LAYERS.search(section.title)
    if layers is None or layers[1].startswith("{"):
        return parse_heading(section.title)
    link = _LINK.fullmatch(layers[1])
    name = link[1] if link else layers[1]
    shipped = list_precisions()
    if name not in shipped:
        raise ConfigError(f"heading: layer_cfg = {name[:60]!r} does not ship; {allowed(shipped)}")
    return load_precision(name)


def count_layer_rules(heading: str) -> int:
    """Return the rule count for layers in a heading."""
    return _layer_text(heading).count(": {")


def linked_file(title: str) -> str | None:
    """Return a title's linked file, relative to the repository root."""
    layers = _LAYERS.search(title)
    link = _LINK.fullmatch(layers[1]) if layers else None
    return link[2] if link else None


def _title(result: Result, *, is_shipped: bool) -> str:
    layers = _LAYERS.search(result.heading)
    name = result.precision_name
    if layers is None or (is_shipped and not _is_defined_so(result)):
        return result.heading
    shown = f"[{name}]({_FOLDER}/{name}.yaml)" if is_shipped else name
    return f"{result.heading[: layers.start(1)]}{shown}{layers[2]}"


def _is_defined_so(result: Result) -> bool:
    """Return whether the measured configuration equals the shipped one of this name.

    The layer count is not recorded. The last layer with a rule is its lower bound.
    """
    precision = load_precision(result.precision_name)
    last = max(map(int, _LAST_LAYER.findall(_layer_text(result.heading))), default=0)
    for num_layers in range(last + 1, min(last + 1 + _MAX_TRIED, _MAX_LAYERS)):
        try:
            if precision.resolve(num_layers, result.model).heading() == result.heading:
                return True
        except ConfigError:  # a rule for a layer above this number
            continue
    return False


def _layer_text(heading: str) -> str:
    """Return a heading's layer rules, empty without rules."""
    layers = _LAYERS.search(heading)
    return layers[1] if layers else ""
