"""Allowed JSON types of an argument, from its schema. Validates nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_MAX_HOPS = 8


def kind_of(value: object) -> str:
    """Return the JSON Schema name of a value's type."""
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def kinds(schema: object, root: Mapping[str, Any], hops: int = _MAX_HOPS) -> frozenset[str]:
    """Return a schema's allowed types, empty without a restriction.

    ``root`` is the schema with the ``$defs`` for references.
    """
    if not isinstance(schema, Mapping) or not hops:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    if isinstance(choices := schema.get("enum"), list):
        return frozenset(kind_of(choice) for choice in choices)
    if "const" in schema:
        return frozenset((kind_of(schema["const"]),))
    if isinstance(place := schema.get("$ref"), str):
        return kinds(_at(place, root), root, hops - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(key), list):
            types = [kinds(branch, root, hops - 1) for branch in branches[:64]]
            return frozenset().union(*types) if all(types) else frozenset()
    return frozenset()


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object's schemas by property."""
    fields = schema.get("properties")
    return fields if isinstance(fields, Mapping) else {}


def parameters(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the allowed types by property of an object."""
    return {name: kinds(each, schema) for name, each in properties(schema).items()}


def value_of(text: str, allowed: frozenset[str]) -> str:
    """Return a value in plain text as JSON of an allowed type.

    Text that is no such value is a string.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        if text.strip() not in words:
            return json.dumps(text, ensure_ascii=False)
        value = words[text.strip()]
    kind = kind_of(value)
    is_allowed = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    if is_allowed and kind != "string":
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> object:
    raise ValueError(name)


def _at(place: str, root: Mapping[str, Any]) -> object:
    node: object = root
    for step in place.removeprefix("#").split("/")[1:]:
        if not isinstance(node, Mapping):
            return None
        node = node.get(step.replace("~1", "/").replace("~0", "~"))
    return node
