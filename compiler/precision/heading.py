"""The one-line spelling of a configuration: rendering and splitting.

``precision_cfg = {...}, fidelity_cfg = {...}[, layer_cfg = {0-3: {...}}][, block_axis = out]``.
Keys and values are text here. ``fragment`` checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilewright.compiler.precision.fragment import LayerRule, Settings
from tilewright.compiler.precision.names import (
    OP_GROUPS,
    SEED_OP_GROUPS,
    SEED_TENSOR_GROUPS,
    TENSOR_GROUPS,
)
from tilewright.compiler.precision.phases import compact_settings
from tilewright.errors import ConfigError, allowed

SECTIONS = ("precision_cfg", "fidelity_cfg", "layer_cfg", "block_axis")
MAX_HEADING_LENGTH = 1 << 20
MAX_WORD_LENGTH = 200

_SECTION = re.compile(rf"(^|[\s,])({'|'.join(SECTIONS)})\s*=")
_TOKEN = re.compile(r"[{}:,=]|[^\s{}:,=]+")


@dataclass(frozen=True, slots=True)
class HeadingText:
    """A split heading. Keys and values are uninterpreted text in source order."""

    precision: Mapping[str, str]
    fidelity: Mapping[str, str]
    layers: tuple[tuple[str, Mapping[str, str]], ...]
    block_axis: str | None


def looks_like_heading(text: str) -> bool:
    """Return whether ``text`` contains a heading section. Names and paths contain none."""
    return _SECTION.search(text) is not None


def render_heading(
    settings: Settings, base: Settings, *, rules: Iterable[LayerRule], block_axis: str | None
) -> str:
    """Render the canonical line.

    Groups added by Tilewright appear only if they differ from ``base``. Pass None as ``block_axis``
    if it equals the base's.
    """
    compact, compact_base = compact_settings(settings), compact_settings(base)
    shown = {
        key: value
        for key, value in compact.items()
        if key in SEED_TENSOR_GROUPS + SEED_OP_GROUPS or compact_base.get(key) != value
    }
    parts = [
        f"precision_cfg = {_render_map(shown, TENSOR_GROUPS)}",
        f"fidelity_cfg = {_render_map(shown, OP_GROUPS)}",
    ]
    if entries := [f"{rule.selector}: {_render_rule(rule)}" for rule in rules]:
        parts.append("layer_cfg = {" + ", ".join(entries) + "}")
    if block_axis is not None:
        parts.append(f"block_axis = {block_axis}")
    return ", ".join(parts)


def split_heading(text: str) -> HeadingText:
    """Split a heading into its sections.

    Raises:
        ConfigError: The text is malformed, or a section is unknown or repeated.
    """
    return _Splitter(text).split()


def _render_rule(rule: LayerRule) -> str:
    return _render_map(compact_settings(rule.settings), TENSOR_GROUPS + OP_GROUPS)


def _render_map(settings: Settings, order: Iterable[str]) -> str:
    return "{" + ", ".join(f"{key}: {settings[key]}" for key in order if key in settings) + "}"


class _Splitter:
    """A parser for a heading, token by token."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_HEADING_LENGTH:
            raise ConfigError(
                f"heading of {len(text)} characters; allowed: up to {MAX_HEADING_LENGTH}"
            )
        self._tokens = _TOKEN.findall(text)
        for token in self._tokens:
            if len(token) > MAX_WORD_LENGTH or not token.isprintable():
                raise ConfigError(
                    f"heading: found {token[:40]!r} of {len(token)} characters; "
                    f"allowed: printable words of up to {MAX_WORD_LENGTH}"
                )
        self._next = 0

    def split(self) -> HeadingText:
        found: dict[str, object] = {}
        while self._next < len(self._tokens):
            if found:
                self._expect(",")
            section = self._take("a section")
            if section not in SECTIONS:
                raise ConfigError(
                    f"heading: unknown section {section!r}; {allowed(SECTIONS, section)}"
                )
            if section in found:
                raise ConfigError(f"heading: {section} is given twice; allowed: once")
            self._expect("=")
            found[section] = self._section(section)
        if not found:
            raise ConfigError(f"heading: nothing in it; {allowed(SECTIONS)}")
        precision, fidelity = found.get("precision_cfg", {}), found.get("fidelity_cfg", {})
        layers, block_axis = found.get("layer_cfg", ()), found.get("block_axis")
        assert isinstance(precision, dict) and isinstance(fidelity, dict)
        assert isinstance(layers, tuple)
        assert block_axis is None or isinstance(block_axis, str)
        return HeadingText(precision, fidelity, layers, block_axis)

    def _section(self, section: str) -> object:
        if section == "block_axis":
            return self._word("in or out")
        return self._layers() if section == "layer_cfg" else self._map()

    def _map(self) -> dict[str, str]:
        pairs: dict[str, str] = {}
        self._expect("{")
        while not self._closes(first=not pairs):
            key = self._word("a group")
            self._expect(":")
            if key in pairs:
                raise ConfigError(f"heading: {key} is given twice; allowed: once")
            pairs[key] = self._word("a value")
        return pairs

    def _layers(self) -> tuple[tuple[str, Mapping[str, str]], ...]:
        # A pattern may repeat: the later entry overrides entries before it.
        entries: list[tuple[str, Mapping[str, str]]] = []
        self._expect("{")
        while not self._closes(first=not entries):
            selector = self._word("a layer, a range or a pattern")
            self._expect(":")
            entries.append((selector, self._map()))
        return tuple(entries)

    def _closes(self, *, first: bool) -> bool:
        """Consume ``}`` (True), or the comma before the next entry."""
        if self._next < len(self._tokens) and self._tokens[self._next] == "}":
            self._next += 1
            return True
        if not first:
            self._expect(",")
        return False

    def _word(self, wanted: str) -> str:
        word = self._take(wanted)
        if word in "{}:,=":
            raise ConfigError(f"heading: found {word!r}; allowed: {wanted}")
        return word

    def _expect(self, mark: str) -> None:
        token = self._take(repr(mark))
        if token != mark:
            raise ConfigError(f"heading: found {token!r}; allowed: {mark!r}")

    def _take(self, wanted: str) -> str:
        if self._next == len(self._tokens):
            raise ConfigError(f"heading: ends too early; allowed: {wanted}")
        self._next += 1
        return str(self._tokens[self._next - 1])
