"""Untrusted YAML as maps, lists and strings: limited size and depth, unique keys, no tags.

The files' readers interpret the values.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tilewright.errors import ConfigError

MAX_FILE_BYTES = 1 << 18
MAX_KEY_LENGTH = 200
MAX_BRACKETS = 32

_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


def cut(text: str, length: int = 80) -> str:
    """Return a text limited to ``length`` by removing its start: the end of a path is more
    useful.
    """
    return text if len(text) <= length else "..." + text[3 - length :]


def read_text(path: Path, *, source: str) -> str:
    """Read a small UTF-8 file. Raise ConfigError with ``source`` on failure."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; allowed: a readable file") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source}: too large; allowed: up to {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: byte {error.start} is bad; allowed: UTF-8 text") from None


class _TextLoader(yaml.SafeLoader):
    """Plain data with strings as scalars: ``no`` and ``1e3`` are not converted."""

    # Merge keys are also rejected: nested merge keys grow exponentially, and `inherits` replaces
    # them.
    yaml_implicit_resolvers = {}  # noqa: RUF012 - a class's table, as in every loader
    # Only tags of plain text are allowed. None rejects all other tags.
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_PLAIN_TAGS, None)
    }

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        # Each level costs time for every token on its line.
        if self.flow_level >= MAX_BRACKETS:
            raise RecursionError
        super().fetch_flow_collection_start(token_class)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "not a map", node.start_mark)
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not is_name(key):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key that is no name", key_node.start_mark
                )
            if key in mapping:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


def parse_yaml(text: str, source: str) -> object:
    """Parse YAML to maps, lists and strings with unique keys.

    Raises:
        ConfigError: The text is invalid. The message has ``source`` and line.
    """
    try:
        return yaml.load(text, Loader=_TextLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not YAML"
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{place}: {problem}; allowed: YAML, each key once") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply; allowed: plain maps") from None
    except (ValueError, OverflowError):  # an escape beyond Unicode, a version with 5,000 digits
        raise ConfigError(f"{source}: a number out of range; allowed: plain text") from None


def is_name(key: object) -> bool:
    """Return whether a key can be quoted in a one-line message."""
    return isinstance(key, str) and key.isprintable() and len(key) <= MAX_KEY_LENGTH
