"""A request's tools: the declared functions, and the functions to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from tilewright.serve.tools.shapes import ToolSpec
from tilewright.serve.web.errors import invalid, unsupported

MAX_TOOLS = 1024
MAX_DEPTH = 100
_T = TypeVar("_T")
_CHOICES = ("none", "auto", "required")


class _Function(Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolField(Struct):
    type: Literal["function"]
    function: _Function


class _Name(Struct):
    name: str


class _ToolChoice(Struct):
    type: Literal["function"]
    function: _Name


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """A request's tools.

    Attributes:
        tools: callable functions.
        given: the functions as the client wrote them, for templates.
        must_call: whether the answer must be a call.
        only: name of the only function to call, or None.
        is_parallel: whether an answer may contain several calls.
    """

    tools: tuple[ToolSpec, ...]
    given: Sequence[Mapping[str, Any]]
    must_call: bool = False
    only: str | None = None
    is_parallel: bool = True


def read_tools(
    declared: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    is_parallel: bool | None = None,
) -> RequestedTools | None:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``. None: no calls.

    Raises:
        ApiError: 400 with the invalid field's name.
    """
    tools = _tools(declared or ())
    only = None
    if isinstance(choice, str) and choice not in _CHOICES:
        said = f"tool_choice {choice[:100]!r}; allowed: {', '.join(_CHOICES)}, or a function"
        raise invalid(said, "tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            raise unsupported("tool_choice", "allowed_tools; allowed: fewer tools")
        only = _convert(choice, _ToolChoice, "tool_choice").function.name
        if only not in {tool.name for tool in tools}:
            said = f"tool_choice: function {only[:100]!r}; allowed: one of tools"
            raise invalid(said, "tool_choice")
    if choice == "required" and not tools:
        raise invalid("tool_choice required; allowed: only with tools", "tool_choice")
    if not tools or choice == "none":
        return None
    must_call = only is not None or choice == "required"
    return RequestedTools(tools, declared or (), must_call, only, is_parallel is not False)


def _tools(declared: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    if len(declared) > MAX_TOOLS:
        raise invalid(f"tools: {len(declared)}; allowed: up to {MAX_TOOLS}", "tools")
    specs: dict[str, ToolSpec] = {}
    for at, each in enumerate(declared):
        function = _convert(each, _ToolField, f"tools[{at}]").function
        if function.name in specs:
            where = f"tools[{at}].function.name"
            raise invalid(f"{where}: {function.name!r} is there twice", where)
        if _is_deep(function.parameters):
            where = f"tools[{at}].function.parameters"
            raise invalid(f"{where}: nested too deep; allowed: {MAX_DEPTH} levels", where)
        specs[function.name] = ToolSpec(
            function.name,
            function.description or "",
            function.parameters or {},
            bool(function.strict),
        )
    return tuple(specs.values())


def _is_deep(schema: object) -> bool:
    """Return whether a schema has more levels than its readers support."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else []
            inner += each if isinstance(each, list) else []
        level = inner
    return bool(level)


def _convert(value: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        param = where + place.rstrip("`")
        raise invalid(f"{param}: {said}", param) from None
