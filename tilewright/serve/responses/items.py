"""Response items as chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from tilewright.serve.web.errors import invalid
from tilewright.serve.web.requests import ChatMessage

Item = dict[str, Any]
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_IMAGE = "input_image"
_T = TypeVar("_T")


class _ContentPart(Struct, frozen=True):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _MessageItem(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_ContentPart]


class _CallItem(Struct, frozen=True):
    call_id: str
    name: str
    arguments: str


class _OutputItem(Struct, frozen=True):
    call_id: str
    output: str | list[_ContentPart]


class _ReasoningItem(Struct, frozen=True):
    summary: list[_ContentPart] = []
    content: list[_ContentPart] | None = None


def new_id(prefix: str) -> str:
    """Make an id, as ``msg_`` and 24 hexadecimal digits."""
    return f"{prefix}_{secrets.token_hex(12)}"


def items_of(value: str | Sequence[Mapping[str, Any]] | None) -> list[Item]:
    """Return a request's input as items with a type and an id."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": [{"type": "input_text", "text": value}]}]
    items = []
    for item in value:
        kind = item.get("type") or ("message" if "role" in item else None)
        prefix = _PREFIXES.get(str(kind), "item")
        items.append({**item, "type": kind, "id": item.get("id") or new_id(prefix)})
    return items


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return items as messages. An assistant's consecutive reasoning, text and calls are joined.

    Raises:
        ApiError: 400 for an unknown type, or fields of another type. The message has the path.
    """
    turns = _Turns()
    for at, item in enumerate(items):
        where, kind = f"input[{at}]", item.get("type")
        if kind == "message":
            turns.take_message(_convert(item, _MessageItem, where), where)
        elif kind == "function_call":
            turns.take_call(_convert(item, _CallItem, where))
        elif kind == "function_call_output":
            converted = _convert(item, _OutputItem, where)
            content = _content_of(converted.output, f"{where}.output")
            turns.end()
            turns.found.append(ChatMessage("tool", content, tool_call_id=converted.call_id))
        elif kind == "reasoning":
            thought = _convert(item, _ReasoningItem, where)
            parts = thought.content or thought.summary
            turns.take_reasoning("".join(part.text or "" for part in parts))
        else:
            said = f"{where}.type: {str(kind)[:100]!r}; allowed: {', '.join(_PREFIXES)}"
            raise invalid(said, f"{where}.type")
    turns.end()
    return turns.found


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


@dataclass(slots=True)
class _Turns:
    """Messages so far, and the assistant's open turn."""

    found: list[ChatMessage] = field(default_factory=list)
    _text: str | None = None
    _reasoning: str = ""
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def take_message(self, message: _MessageItem, where: str) -> None:
        if message.role != "assistant":
            content = _content_of(message.content, f"{where}.content")
            self.end()
            self.found.append(ChatMessage(message.role, content))
            return
        text = _text_of(message.content, f"{where}.content")
        if self._text is not None or self._calls:
            self.end()
        self._text = text

    def take_reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.end()
        self._reasoning += text

    def take_call(self, call: _CallItem) -> None:
        function = {"name": call.name, "arguments": call.arguments}
        self._calls.append({"id": call.call_id, "type": "function", "function": function})

    def end(self) -> None:
        """End the assistant's turn, unless it is empty."""
        if self._text is not None or self._calls or self._reasoning:
            text = self._text if self._text is not None or self._calls else ""
            self.found.append(
                ChatMessage(
                    "assistant",
                    text,
                    tool_calls=self._calls or None,
                    reasoning_content=self._reasoning or None,
                )
            )
        self._text, self._reasoning, self._calls = None, "", []


def _content_of(content: str | Sequence[_ContentPart], where: str) -> str | list[dict[str, Any]]:
    """Return a text, or chat parts if there are images."""
    if isinstance(content, str) or not any(item.type == _IMAGE for item in content):
        return _text_of(content, where)
    parts: list[dict[str, Any]] = []
    for at, item in enumerate(content):
        if item.type != _IMAGE:
            parts.append({"type": "text", "text": _text_of([item], where)})
        elif item.image_url is None:
            param = f"{where}[{at}]"
            raise invalid(f"{param}: {_IMAGE} without image_url; allowed: a data: URL", param)
        else:
            image = {"url": item.image_url, "detail": item.detail or "auto"}
            parts.append({"type": "image_url", "image_url": image})
    return parts


def _text_of(content: str | Sequence[_ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, item in enumerate(content):
        name = _TEXTS.get(item.type)
        text = None if name is None else getattr(item, name)
        if text is None:
            param = f"{where}[{at}]"
            said = f"{item.type[:100]!r} without {name}" if name else repr(item.type[:100])
            known = "input_text, input_image, output_text, refusal"
            raise invalid(f"{param}: a part of type {said}; allowed: {known}", param)
        texts.append(text)
    return "".join(texts)


def _convert(value: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        param = where + place.rstrip("`")
        raise invalid(f"{param}: {said}", param) from None
