"""Grammar rules of tool calls in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tilewright.runtime.grammar.annotations import without_annotations

Term: TypeAlias = Callable[[str], str]
"""A function that writes a text as a Lark term. Special tokens have their own terms."""

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A callable function. ``schema`` is its arguments' JSON schema."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar rules for the tool calls of a model family.

    Attributes:
        opening: marker before the calls, empty without a marker.
        rules: Lark rules. The rule ``region`` follows the marker.
        first: first character of a call, for formats without a marker.
        repeats: whether a region is a single call, and further calls have their own markers.
    """

    opening: str
    rules: tuple[str, ...]
    first: str = ""
    repeats: bool = False


def quoted(text: str) -> str:
    """Return a text as a Lark term."""
    return json.dumps(text, ensure_ascii=False)


def json_term(schema: Mapping[str, Any], *, is_strict: bool = True) -> str:
    """Return a term for JSON that obeys a schema. Strict schemas raise for unknown keywords."""
    style = {**_STYLE, "lenient": not is_strict}
    text = json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)
    return f"%json {without_annotations(text)}"


def arguments_term(tool: ToolSpec) -> str:
    """Return a term for a function's arguments as a JSON object."""
    return json_term({"type": "object", **tool.schema}, is_strict=tool.is_strict)


def property_term(tool: ToolSpec, schema: object) -> str:
    """Return a term for an argument as JSON. Its schema may use the function's definitions."""
    named = schema if isinstance(schema, Mapping) else {}
    shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    return json_term({**shared, **named}, is_strict=tool.is_strict)


def is_needed(tool: ToolSpec, key: str) -> bool:
    """Return whether the argument is required."""
    needed = tool.schema.get("required")
    return isinstance(needed, list) and key in needed


def any_call(tools: Sequence[ToolSpec]) -> str:
    """Return the rule ``call`` with the alternatives ``call_0``, ``call_1`` and so on."""
    return f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"


def object_rules(tools: Sequence[ToolSpec], key: str) -> list[str]:
    """Return rules for ``call``: an object with a name, and its arguments under ``key``."""
    rules = [any_call(tools)]
    for at, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        rules.append(f"call_{at}: {quoted(head)} {arguments_term(tool)} {quoted('}')}")
    return rules


def list_of_calls(is_parallel: bool) -> str:
    """Return terms for a list of ``call``."""
    more = '(", " call)* ' if is_parallel else ""
    return f'"[" call {more}"]"'
