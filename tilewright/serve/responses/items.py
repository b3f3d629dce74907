"""Items of responses as the messages of a chat."""

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
_T = TypeVar("_T")


class _ContentPart(Struct, frozen=True):
    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None


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


def items_of(given: str | Sequence[Mapping[str, Any]] | None) -> list[Item]:
    """Return the input of a request as items with a type and an id."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    found = []
    for each in given:
        kind = each.get("type") or ("message" if "role" in each else None)
        prefix = _PREFIXES.get(str(kind), "item")
        found.append({**each, "type": kind, "id": each.get("id") or new_id(prefix)})
    return found


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return items as messages: an assistant's reasoning, text and calls in a row are one.

    Raises:
        ApiError: 400 naming the item that is of another type, or not as its type says.
    """
    turns = _Turns()
    for at, item in enumerate(items):
        where, kind = f"input[{at}]", item.get("type")
        if kind == "message":
            turns.take_message(_convert(item, _MessageItem, where), where)
        elif kind == "function_call":
            turns.take_call(_convert(item, _CallItem, where))
        elif kind == "function_call_output":
            given = _convert(item, _OutputItem, where)
            text = _text_of(given.output, f"{where}.output")
            turns.end()
            turns.found.append(ChatMessage("tool", text, tool_call_id=given.call_id))
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
    """Messages so far, and the assistant's turn that is not ended."""

    found: list[ChatMessage] = field(default_factory=list)
    _text: str | None = None
    _reasoning: str = ""
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def take_message(self, given: _MessageItem, where: str) -> None:
        text = _text_of(given.content, f"{where}.content")
        if given.role != "assistant":
            self.end()
            self.found.append(ChatMessage(given.role, text))
            return
        if self._text is not None or self._calls:
            self.end()
        self._text = text

    def take_reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.end()
        self._reasoning += text

    def take_call(self, given: _CallItem) -> None:
        function = {"name": given.name, "arguments": given.arguments}
        self._calls.append({"id": given.call_id, "type": "function", "function": function})

    def end(self) -> None:
        """End the assistant's turn, where it has anything."""
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


def _text_of(content: str | Sequence[_ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        name = _TEXTS.get(part.type)
        text = None if name is None else getattr(part, name)
        if text is None:
            place = f"{where}[{at}]"
            said = f"{part.type[:100]!r} without {name}" if name else repr(part.type[:100])
            known = "input_text, output_text, refusal"
            raise invalid(f"{place}: a part of type {said}; allowed: {known}", place)
        texts.append(text)
    return "".join(texts)


def _convert(value: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        param = where + place.rstrip("`")
        raise invalid(f"{param}: {said}", param) from None
