"""Calls as rules of llguidance's Lark, so that answers can be held to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tilewright.runtime.grammar.annotations import without_annotations

Term: TypeAlias = Callable[[str], str]
"""Writes a text of a tokenizer as a term of Lark: special tokens have one of their own."""

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that may be called; ``schema`` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How one model family writes calls, as grammar rules.

    Attributes:
        opening: the marker before them; empty where there is none.
        rules: of Lark; one of them is ``region``, what stands behind the marker.
        first: what a call begins with where there is no marker.
        repeats: whether a region is one call, and further ones follow with markers of their own.
    """

    opening: str
    rules: tuple[str, ...]
    first: str = ""
    repeats: bool = False


def quoted(text: str) -> str:
    """A text as a term of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_term(schema: Mapping[str, Any], *, is_strict: bool = True) -> str:
    """JSON that obeys a schema; keywords that are not known are an error where it is strict."""
    style = {**_STYLE, "lenient": not is_strict}
    text = json.dumps({**schema, "x-guidance": style}, ensure_ascii=False)
    return f"%json {without_annotations(text)}"


def arguments_term(tool: ToolSpec) -> str:
    """The arguments of a function as a JSON object."""
    return json_term({"type": "object", **tool.schema}, is_strict=tool.is_strict)


def property_term(tool: ToolSpec, schema: object) -> str:
    """One argument as JSON; its schema may refer to what the function's one defines."""
    named = schema if isinstance(schema, Mapping) else {}
    shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    return json_term({**shared, **named}, is_strict=tool.is_strict)


def is_needed(tool: ToolSpec, key: str) -> bool:
    """Whether a call must have the argument."""
    needed = tool.schema.get("required")
    return isinstance(needed, list) and key in needed


def any_call(tools: Sequence[ToolSpec]) -> str:
    """The rule that one of ``call_0``, ``call_1`` and so on is there."""
    return f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"


def object_rules(tools: Sequence[ToolSpec], key: str) -> list[str]:
    """Make the rule ``call``: an object of a function's name, and its arguments under ``key``."""
    rules = [any_call(tools)]
    for at, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        rules.append(f"call_{at}: {quoted(head)} {arguments_term(tool)} {quoted('}')}")
    return rules


def list_of_calls(is_parallel: bool) -> str:
    """Terms for a list of ``call``."""
    more = '(", " call)* ' if is_parallel else ""
    return f'"[" call {more}"]"'
