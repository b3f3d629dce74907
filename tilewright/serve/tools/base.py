"""What a format of calls is, and the functions that a request declares."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilewright.serve.tools.events import ToolParser
from tilewright.serve.tools.shapes import CallGrammar, Term, ToolSpec

Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""A call of an earlier turn: a function's name, and its arguments."""


def call_id() -> str:
    """Make a new, random id for a call."""
    return f"call_{secrets.token_hex(12)}"


def result_message(content: str) -> str:
    """What a function gave, as a user's turn for models that know no role of tools."""
    return f"<tool_response>\n{content}\n</tool_response>"


def listed(tools: Sequence[ToolSpec]) -> str:
    """List functions as JSON, one on each line, as templates without tools want them."""
    return "\n".join(
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.schema},
            ensure_ascii=False,
        )
        for tool in tools
    )


@dataclass(frozen=True, slots=True)
class ToShape:
    """Calls that are to be put into rules; ``template``: the source of the chat template."""

    tools: Sequence[ToolSpec]
    is_parallel: bool
    template: str
    term: Term


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models is told of functions, and how it calls them.

    Attributes:
        marks: texts of chat templates that ask for it; one of them is enough.
        parser: makes the reader of one answer.
        instruction: the system message that asks for it, where a template does not.
        write: calls of an earlier turn, for the same templates.
        shape: what its calls look like.
        tokens: special tokens that belong to it, so that decoding must not leave them out.
        new_id: names a call as this family's templates take it.
        known_id: makes such a name of one that a client has kept from elsewhere.
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
