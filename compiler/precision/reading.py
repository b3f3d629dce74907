"""Reads configurations: a name in precision_cfgs/, a YAML file, a per-decoder JSON file or a
heading.

Files are untrusted. Their size is limited, data are plain, and duplicate keys or cyclic
``inherits`` are errors.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tilewright.compiler.precision.config import PrecisionConfig
from tilewright.compiler.precision.fragment import (
    FRAGMENT_KEYS,
    Fragment,
    LayerRule,
    as_map,
    check_keys,
    read_fragment,
    read_rule,
)
from tilewright.compiler.precision.heading import looks_like_heading, split_heading
from tilewright.compiler.precision.names import normalise_key
from tilewright.compiler.precision.weight_overrides import (
    DTYPES,
    is_weight_overrides,
    read_weight_overrides,
)
from tilewright.errors import ConfigError, allowed
from tilewright.utils.plain_yaml import cut, is_name, parse_yaml, read_text

BASE = "base"
FOLDER = "precision_cfgs"
MAX_CHAIN = 32
_ABOUT = ("inherits", "description")
_DECODERS = "decoders"
_MAPS_OF_DECODER = ("precision_cfg", "fidelity_cfg")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_YAML_SUFFIXES = (".yaml", ".yml")
_SUFFIXES = (*_YAML_SUFFIXES, ".json")


def list_precisions() -> dict[str, str]:
    """Return the name and description of each shipped configuration, sorted by name."""
    return {name: load_precision(name).description for name in _shipped_names()}


def load_precision(spec: str) -> PrecisionConfig:
    """Load the configuration ``spec``.

    ``spec`` is a name in precision_cfgs/, a path to a .yaml file, a path to a per-decoder .json
    file, or a heading (``precision_cfg = {...}, fidelity_cfg = {...}``). Unset values come from
    ``inherits``, and finally from precision_cfgs/base.yaml.

    Raises:
        ConfigError: The name is unknown, the file is unreadable, or its contents are not allowed.
    """
    if looks_like_heading(spec):
        return parse_heading(spec)
    return _load_file(_locate(spec, folder=Path(), where="precision"), chain=())


def parse_heading(heading: str) -> PrecisionConfig:
    """Return a heading's configuration, inherited from the base.

    Raises:
        ConfigError: The line is malformed, or a key or value is not allowed.
    """
    text = split_heading(heading)
    raw: dict[str, object] = {"precision": text.precision, "fidelity": text.fidelity}
    if text.block_axis is not None:
        raw["block_axis"] = text.block_axis
    plain = read_fragment(raw, source="heading")
    rules = tuple(read_rule(name, entry, where="heading") for name, entry in text.layers)
    base = load_precision(BASE)
    fragment = Fragment(
        source="heading", settings=plain.settings, rules=rules, block_axis=plain.block_axis
    )
    return PrecisionConfig("heading", "one line", BASE, (*base.fragments, fragment))


def _shipped_folder() -> Path:
    # The directory is a sibling of the package `compiler`, in a clone and in site-packages.
    folder = Path(__file__).resolve().parents[2] / FOLDER
    if folder.is_dir():
        return folder
    try:
        return Path(str(importlib.resources.files(FOLDER).joinpath(f"{BASE}.yaml"))).parent
    except ModuleNotFoundError:
        raise ConfigError(f"{FOLDER}/ is missing; allowed: a complete installation") from None


def _shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.yaml")))


def _locate(spec: str, *, folder: Path, where: str) -> Path:
    """Return the file of a name, or of a path relative to ``folder``."""
    if spec.endswith(_SUFFIXES):
        path = folder / spec
        try:
            is_file = path.is_file()
        except OSError:  # name too long, or directory not searchable
            is_file = False
        if not is_file:
            raise ConfigError(f"{where}: no file {cut(str(path))!r}; {_what_is_allowed(path.stem)}")
        return path
    if not _NAME.fullmatch(spec) or spec not in _shipped_names():
        raise ConfigError(f"{where}: unknown precision {cut(spec, 36)!r}; {_what_is_allowed(spec)}")
    return _shipped_folder() / f"{spec}.yaml"


def _what_is_allowed(given: str) -> str:
    return allowed((*_shipped_names(), "a path to a .yaml or .json", "a heading"), given)


def _load_file(path: Path, *, chain: tuple[Path, ...]) -> PrecisionConfig:
    path = path.resolve()
    source = _display(path)
    if path in chain:
        names = " -> ".join(_display(step) for step in (*chain, path))
        raise ConfigError(f"{source}: inherits itself: {names}; allowed: a chain that ends")
    if len(chain) == MAX_CHAIN:
        raise ConfigError(f"{source}: inherits too deeply; allowed: a chain of {MAX_CHAIN} files")
    text = read_text(path, source=source)
    is_json = path.suffix == ".json"
    parsed = _parsed(text, source, is_json=is_json)
    if is_json and is_weight_overrides(parsed):
        fragment = read_weight_overrides(parsed, source=source)  # type: ignore[arg-type]
        base = _load_file(_shipped_folder() / f"{BASE}.yaml", chain=(*chain, path))
        return PrecisionConfig(path.stem, "", BASE, (*base.fragments, fragment))
    raw = as_map(parsed, where=source)
    known = (*((_DECODERS,) if is_json else FRAGMENT_KEYS), *_ABOUT)
    if is_json and _DECODERS not in raw and (key := next((k for k in raw if k not in known), "")):
        globs = f"or only globs with {', '.join(DTYPES)}"
        raise ConfigError(f"{source}: unknown key {key!r}; {allowed((*known, globs), key)}")
    check_keys(raw, known, where=source)
    parent = _read_parent(raw, path=path, source=source)
    body = {key: value for key, value in raw.items() if key not in _ABOUT}
    if is_json:
        fragment = _read_decoders(body, source=source)
    else:
        fragment = read_fragment(body, source=source)
    description = _read_line(raw, "description", source=source)
    if parent is None:
        return PrecisionConfig(path.stem, description, None, (fragment,))
    origin = _locate(parent, folder=path.parent, where=f"{source}: inherits")
    inherited = _load_file(origin, chain=(*chain, path))
    return PrecisionConfig(path.stem, description, parent, (*inherited.fragments, fragment))


def _display(path: Path) -> str:
    """Return a shipped file's short name, or the full path of another file, on one line."""
    if path.parent == _shipped_folder():
        return f"{FOLDER}/{path.name}"
    return str(path) if str(path).isprintable() else repr(str(path))


@functools.lru_cache(maxsize=64)
def _parsed(text: str, source: str, *, is_json: bool) -> object:
    """Parse a text once: parsing takes milliseconds. Callers must not modify the result."""
    return _parse_json(text, source) if is_json else parse_yaml(text, source)


def _parse_json(text: str, source: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for key, count in Counter(key for key, _ in pairs).items():
            if not is_name(key):
                raise ConfigError(f"{source}: {cut(key)!r} is no name; allowed: printable keys")
            if count > 1:
                raise ConfigError(f"{source}: {key!r} is given twice; allowed: once")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"{source}:{line}: not read; allowed: JSON of plain maps") from None


def _read_parent(raw: Mapping[str, object], *, path: Path, source: str) -> str | None:
    """Return the parent's name. Only the base has none."""
    if "inherits" in raw:
        return _read_line(raw, "inherits", source=source)
    return None if path == _shipped_folder() / f"{BASE}.yaml" else BASE


def _read_line(raw: Mapping[str, object], key: str, *, source: str) -> str:
    value = raw.get(key, "")
    if not isinstance(value, str) or not value.strip().isprintable():
        raise ConfigError(f"{source}: {key} is not one line; allowed: one line of text")
    return value.strip()


def _read_decoders(raw: Mapping[str, object], *, source: str) -> Fragment:
    """Read a per-decoder file: ``{"decoders": {"0": {"precision_cfg": ..., "fidelity_cfg":
    ...}}}``.
    """
    decoders = as_map(raw.get(_DECODERS), where=f"{source}: decoders")
    if not decoders:
        raise ConfigError(f"{source}: no decoders; allowed: one entry or more")
    rules: list[LayerRule] = []
    for index, entry in decoders.items():
        where = f"{source}: decoders.{index}"
        if not re.fullmatch(r"\d{1,6}", index):
            raise ConfigError(f"{where}: not a decoder; allowed: its index from 0")
        settings = as_map(entry, where=where)
        check_keys(settings, _MAPS_OF_DECODER, where=where)
        if not any(settings.values()):
            raise ConfigError(f"{where}: no settings; {allowed(_MAPS_OF_DECODER)}")
        nested = {
            "precision": _plain(settings.get("precision_cfg"), where=where),
            "fidelity": _plain(settings.get("fidelity_cfg"), where=where),
        }
        rules.append(read_rule(index, nested, where=f"{source}: decoders"))
    return Fragment(source=source, rules=tuple(rules), is_table=True)


def _plain(raw: object, *, where: str) -> dict[str, object]:
    """Replace null activations with ``mixed``: per-decoder files write null for the op's own
    format.
    """
    return {
        key: "mixed" if value is None and normalise_key(key) == "activation" else value
        for key, value in as_map(raw, where=where).items()
    }
