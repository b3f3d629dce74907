"""Formats for tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilewright.serve.tools.events import ToolParser
from tilewright.serve.tools.shapes import CallGrammar, Term, ToolSpec

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A call of an earlier turn: the name of a function, and its arguments."""


def call_id() -> str:
    """Return a new random id for a call."""
    return f"call_{secrets.token_hex(12)}"


def result_message(content: str) -> str:
    """Return a function's result as a user message, for models without a tool role."""
    return f"<tool_response>\n{content}\n</tool_response>"


def listed(tools: Sequence[ToolSpec]) -> str:
    """Return functions as JSON lines, for templates without tools."""
    return "\n".join(
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.schema},
            ensure_ascii=False,
        )
        for tool in tools
    )


@dataclass(frozen=True, slots=True)
class ToShape:
    """Input for grammar rules. ``template`` is the chat template's source."""

    tools: Sequence[ToolSpec]
    is_parallel: bool
    template: str
    term: Term


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Functions and names for a model family's format of tool calls.

    Attributes:
        name: name for ``--tool-format``.
        marks: texts in chat templates. A single mark selects the format.
        parser: returns a parser for an answer.
        instruction: returns a system message about the tools, if the template has none.
        write: returns an earlier turn's calls as text.
        shape: returns the grammar for calls.
        tokens: the format's special tokens. Decoding must show them.
        new_id: returns a new id that the templates accept.
        known_id: converts the client's id to an id that the templates accept.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[Sequence[ToolSpec]], ToolParser]
    instruction: Callable[[Sequence[ToolSpec]], str]
    write: Callable[[Sequence[Call]], str]
    shape: Callable[[ToShape], CallGrammar]
    tokens: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    known_id: Callable[[str], str] = str
