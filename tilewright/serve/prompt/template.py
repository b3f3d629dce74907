"""Chat template properties, found by rendering probes, and messages adapted to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from tilewright.errors import RequestError
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.base import Call, ToolFormat, result_message
from tilewright.serve.tools.formats.table import FORMATS, GENERIC, format_of
from tilewright.serve.tools.shapes import ToolSpec

Message: TypeAlias = dict[str, Any]

_ASK = {"role": "user", "content": "probe"}
_SYSTEM = {"role": "system", "content": "commands"}
_TOOL = "probe_tool"
_ID = "probe0id1"  # some templates require nine letters and digits
_DECLARED = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "d"}},
            "required": ["probe_key"],
        },
    },
}
_VARIABLES: dict[str, tuple[object, object]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("low", "high"),
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """A chat template's properties.

    Attributes:
        reads_tools: whether the template renders tools.
        tools_in_system: whether tools are a field of the system message.
        writes_calls: whether the template renders calls of earlier turns.
        wants_objects: whether it takes arguments as objects, not as JSON text.
        loses_system: whether it refuses or drops a system message, but no user message.
        variables: known variables with an effect.
        format: tool call format. None: unknown.
    """

    reads_tools: bool = False
    tools_in_system: bool = False
    writes_calls: bool = False
    wants_objects: bool = True
    loses_system: bool = False
    variables: tuple[str, ...] = ()
    format: ToolFormat | None = None

    @property
    def calls(self) -> ToolFormat:
        """The format of tool calls, or the generic format."""
        return self.format or GENERIC

    @property
    def tells_tools(self) -> bool:
        """Return whether the template describes tools to the model.

        Else an instruction describes them. Tools in an unknown format need the instruction too.
        """
        return self.reads_tools and self.format is not None

    def messages(self, requested: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """Return the messages in a form that the template can render."""
        names: dict[str, str] = {}
        adapted = [self._prepared(message, names) for message in requested]
        if not self.writes_calls:
            adapted = self._spelled(adapted)
        if tools and not self.tells_tools:
            add = _in_user if self.loses_system else _in_system
            adapted = add(adapted, self.calls.instruction(tools))
        elif tools and self.tools_in_system:
            adapted = _in_system(
                adapted, "", tools=json.dumps(_declared(tools), ensure_ascii=False)
            )
        return adapted

    def _prepared(self, message: Message, names: dict[str, str]) -> Message:
        """Adapt a message: calls get known ids and arguments, results get their function's name.

        ``names`` maps the earlier call ids to their functions.
        """
        known_id = self.calls.known_id
        if message["role"] == "tool":
            call_id = str(message.get("tool_call_id", ""))
            named = {"name": names[call_id]} if call_id in names else {}
            return {**named, **message, "tool_call_id": known_id(call_id)}
        if "tool_calls" not in message:
            return message
        calls = []
        for call in message["tool_calls"]:
            call_id = str(call.get("id", ""))
            names[call_id] = _name(call)
            calls.append({**_with_arguments(call, self.wants_objects), "id": known_id(call_id)})
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**kept, "tool_calls": calls} if calls else kept

    def _spelled(self, messages: Sequence[Message]) -> list[Message]:
        """Return calls as assistant text, and results as user text. Adjacent results are joined."""
        spelled: list[Message] = []
        is_result = False
        for message in messages:
            was_result, is_result = is_result, message["role"] == "tool"
            if message.get("tool_calls"):
                calls = [_call(call) for call in message["tool_calls"]]
                texts = [message.get("content") or "", self.calls.write(calls)]
                kept = {key: value for key, value in message.items() if key != "tool_calls"}
                spelled.append({**kept, "content": "\n".join(filter(None, texts))})
            elif is_result:
                if isinstance(message.get("content"), list):
                    raise RequestError(
                        "messages: an image of role 'tool', but the chat template writes no tool "
                        "results; allowed: an image of role 'user'"
                    )
                text = result_message(message.get("content") or "")
                if was_result:
                    spelled[-1] = {"role": "user", "content": f"{spelled[-1]['content']}\n{text}"}
                else:
                    spelled.append({"role": "user", "content": text})
            else:
                spelled.append(message)
        return spelled


def read_template(coder: TextCoder, tool_format: str | None) -> TemplateFacts:
    """Probe a tokenizer's template. ``tool_format`` overrides the detected format."""
    source = coder.chat_template
    forced = FORMATS[tool_format] if tool_format is not None else None
    if source is None:
        return TemplateFacts(format=forced)
    system = {"role": "system", "content": "s", "tools": json.dumps([_DECLARED])}
    in_system = _TOOL in _render(coder, [system, _ASK])
    reads = any(
        _TOOL in _render(coder, messages, tools=[_DECLARED])
        for messages in ([_ASK], [{"role": "system", "content": "s"}, _ASK])
    )
    objects, texts = (_render(coder, _called(as_object)) for as_object in (True, False))
    has_objects = _is_written(objects) and "{'probe_key'" not in objects
    changing = []
    for name, values in _VARIABLES.items():
        one, other = (_render(coder, [_ASK], variables={name: value}) for value in values)
        if one != other:
            changing.append(name)
    has_user = _ASK["content"] in _render(coder, [_ASK])
    found = format_of(source) if reads or in_system else None
    return TemplateFacts(
        reads_tools=reads or in_system,
        tools_in_system=in_system and not reads,
        writes_calls=has_objects or _is_written(texts),
        wants_objects=has_objects or not _is_written(texts),
        loses_system=has_user and _SYSTEM["content"] not in _render(coder, [_SYSTEM, _ASK]),
        variables=tuple(changing),
        format=forced or found,
    )


def _render(
    coder: TextCoder,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> str:
    """Render a probe. Return an empty text if the template refuses it."""
    try:
        return coder.apply_chat_template(
            messages, True, tools=tools, variables=variables, must_read=False
        )
    except (RequestError, RecursionError):
        return ""


def _called(as_object: bool) -> list[Message]:
    arguments: Any = {"probe_key": "probe_value"}
    function = {
        "name": "probe_call",
        "arguments": arguments if as_object else json.dumps(arguments),
    }
    call = {"id": _ID, "type": "function", "function": function}
    return [
        _ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": _ID, "name": "probe_call"},
    ]


def _is_written(text: str) -> bool:
    return "probe_call" in text and "probe_key" in text and "probe_value" in text


def _with_arguments(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return dict(call)
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        arguments = _decoded(arguments)
    elif not as_object and arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _call(call: Mapping[str, Any]) -> Call:
    """Return an earlier call for a format. Arguments are empty unless they are an object."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    arguments = _decoded(arguments) if isinstance(arguments, str) else arguments
    return _name(call), arguments if isinstance(arguments, dict) else {}


def _declared(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [
        {"name": tool.name, "description": tool.description, "parameters": tool.schema}
        for tool in tools
    ]


def _in_user(messages: Sequence[Message], text: str) -> list[Message]:
    """Insert a text before the first user message, or as a new user message."""
    for at, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, list):
                content = [{"type": "text", "text": f"{text}\n\n"}, *content]
            else:
                content = "\n\n".join(filter(None, (text, content)))
            return [*messages[:at], {**message, "content": content}, *messages[at + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _in_system(messages: Sequence[Message], text: str, **keys: str) -> list[Message]:
    """Append a text to the system message, or add a system message."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text, **keys}, *messages]
    content = "\n\n".join(filter(None, (first["content"], text)))
    return [{**first, "content": content, **keys}, *messages[1:]]
