"""Qwen3-Coder and Qwen3.5: XML calls with plain values, converted by the function's schema.

``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from tilewright.serve.output.stops import StopMatcher
from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import (
    SPACE,
    Argued,
    Event,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from tilewright.serve.tools.json_calls import is_name, merged
from tilewright.serve.tools.schema import kinds, parameters, properties, value_of
from tilewright.serve.tools.shapes import (
    CallGrammar,
    ToolSpec,
    any_call,
    is_needed,
    property_term,
    quoted,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"
_ENDS = (f"\n{_END_PARAMETER}", _END_PARAMETER, f"\n{_PARAMETER}", f"\n{_END_FUNCTION}")
_STRING = frozenset(("string",))
_Kinds = Mapping[str, frozenset[str]]


class _XmlState(Enum):
    OPENED = auto()  # before a function
    NAME = auto()
    INSIDE = auto()  # before a parameter, or the end of the function
    KEY = auto()
    VALUE = auto()
    CLOSED = auto()  # before another function, or the end of the region
    OVER = auto()


_TAGS = {
    _XmlState.OPENED: {_FUNCTION: _XmlState.NAME},
    _XmlState.INSIDE: {_PARAMETER: _XmlState.KEY, _END_FUNCTION: _XmlState.CLOSED},
    _XmlState.CLOSED: {_FUNCTION: _XmlState.NAME, _CLOSE: _XmlState.OVER},
}


class _XmlRegion:
    """A ``<tool_call>``, see `CallRegion`. ``known`` has the parameter types by function."""

    def __init__(self, known: Mapping[str, _Kinds], marker: str) -> None:
        self.is_call = False
        self.rest: str | None = None
        self._known = known
        self._state = _XmlState.NAME if marker == _FUNCTION else _XmlState.OPENED
        self._pending = ""  # beginning of a tag, or a name
        self._kinds: _Kinds = {}
        self._num_given = 0
        self._value = _XmlValue(frozenset())

    def push(self, text: str) -> list[Event]:
        """See `CallRegion`."""
        events: list[Event] = []
        while text and self.rest is None:
            if self._state is _XmlState.VALUE:
                text = self._read_value(text, events)
            else:
                self._step(text[0], text[1:], events)
                text = text[1:]
        return merged(events)

    def flush(self) -> list[Event]:
        """See `CallRegion`."""
        return [Argued(self._value.flush())] if self._state is _XmlState.VALUE else []

    def _step(self, character: str, behind: str, events: list[Event]) -> None:
        if self._state in (_XmlState.NAME, _XmlState.KEY):
            self._take_name(character, behind, events)
            return
        if character in SPACE and not self._pending:
            return
        self._pending += character
        tags = _TAGS[self._state]
        if self._pending in tags:
            self._state, self._pending = tags[self._pending], ""
            if self._state is _XmlState.CLOSED:
                events += [Argued("}" if self._num_given else "{}"), ToolCallEnd()]
            elif self._state is _XmlState.OVER:
                self.rest = behind
        elif not any(tag.startswith(self._pending) for tag in tags):
            self._leave(self._pending + behind, events)

    def _leave(self, rest: str, events: list[Event]) -> None:
        """End the current call and the region. ``rest`` is no part of a call."""
        if self._state in (_XmlState.INSIDE, _XmlState.KEY):
            events += [Argued("}" if self._num_given else "{}"), ToolCallEnd()]
        self.rest = rest

    def _take_name(self, character: str, behind: str, events: list[Event]) -> None:
        if character != ">":
            self._pending += character
            if len(self._pending) > 256 or character in "\n<":
                self._leave_name(character + behind, events)
            return
        name, self._pending = self._pending.strip(), self._pending + ">"
        if self._state is _XmlState.NAME and not is_name(name):
            self._leave_name(character + behind, events)
            return
        self._pending = ""
        if self._state is _XmlState.KEY:
            separator = "{" if not self._num_given else ", "
            events.append(Argued(f"{separator}{json.dumps(name, ensure_ascii=False)}: "))
            self._num_given += 1
            self._state = _XmlState.VALUE
            self._value = _XmlValue(self._kinds.get(name, frozenset()))
        else:
            self.is_call, self._num_given, self._state = True, 0, _XmlState.INSIDE
            self._kinds = self._known.get(name, {})
            events.append(ToolCallStart(name))

    def _leave_name(self, there: str, events: list[Event]) -> None:
        """Leave the region within a name. ``there`` begins with an invalid character."""
        if self.is_call:  # restore the tag, which a region without calls has not consumed
            tag = _FUNCTION if self._state is _XmlState.NAME else _PARAMETER
            there = tag + self._pending[:-1] + there
        self._leave(there, events)

    def _read_value(self, text: str, events: list[Event]) -> str:
        events.append(Argued(self._value.push(text)))
        if self._value.rest is None:
            return ""
        self._state = _XmlState.INSIDE
        return self._value.rest


class _XmlValue:
    """A parameter's text as JSON. Strings are streamed, other values are complete at their end.

    The newlines after the opening tag and before the closing tag are dropped.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self.rest: str | None = None
        self._allowed = allowed
        self._streams = allowed == _STRING
        self._matcher = StopMatcher(_ENDS)
        self._is_first = True
        self._text: list[str] = []

    def push(self, text: str) -> str:
        """Return the JSON that is certain. Set ``rest`` at the value's end."""
        said = self._take(self._matcher.push(text))
        end = self._matcher.found
        if end is None:
            return said
        self.rest = self._matcher.rest
        if not end.endswith(_END_PARAMETER):  # the model has omitted the tag
            self.rest = end + self.rest
        if self._streams:
            return said + ('"' if self._text else '""')
        return value_of("".join(self._text), self._allowed)

    def flush(self) -> str:
        """Return the JSON of a cut value."""
        said = self._take(self._matcher.flush())
        if self._streams or not self._text:
            return said
        whole = value_of("".join(self._text), self._allowed)
        return whole[:-1] if whole.startswith('"') else whole

    def _take(self, text: str) -> str:
        if self._is_first and text:
            text, self._is_first = text.removeprefix("\n"), False
        if not text:
            return ""
        opening = "" if self._text else '"'
        self._text.append(text)
        return opening + json.dumps(text, ensure_ascii=False)[1:-1] if self._streams else ""


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    known = {tool.name: parameters(tool.schema) for tool in tools}
    return ToolParser((_OPEN, _FUNCTION), lambda marker: _XmlRegion(known, marker))


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n<tools>\n{listed(tools)}\n</tools>\nTo call one, answer "
        f"with\n{_OPEN}\n{_FUNCTION}NAME>\n{_PARAMETER}KEY>\nvalue\n{_END_PARAMETER}\n"
        f"{_END_FUNCTION}\n{_CLOSE}"
    )


def _write(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        lines = [_OPEN, f"{_FUNCTION}{name}>"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"{_PARAMETER}{key}>", text, _END_PARAMETER]
        texts.append("\n".join([*lines, _END_FUNCTION, _CLOSE]))
    return "\n".join(texts)


def _shape(spec: ToShape) -> CallGrammar:
    rules = [any_call(spec.tools)]
    for at, tool in enumerate(spec.tools):
        terms = ['"\\n"?', quoted(f"{_FUNCTION}{tool.name}>\n")]
        for key, schema in properties(tool.schema).items():
            term = f"({quoted(f'{_PARAMETER}{key}>')} {_value_term(schema, tool)})"
            terms.append(term if is_needed(tool, key) else f"{term}?")
        rules.append(f"call_{at}: {' '.join(terms)} {quoted(_END_FUNCTION)}")
    end = quoted(f"\n{_END_PARAMETER}\n")
    rules += [f"text[lazy]: /(.|\\n)*/ {end}", f"end: {end}"]
    return CallGrammar(_OPEN, (f'region: call "\\n" {spec.term(_CLOSE)}', *rules), repeats=True)


def _value_term(schema: object, tool: ToolSpec) -> str:
    """Return a grammar term for a value: plain text for strings, else JSON."""
    allowed = kinds(schema, tool.schema)
    if allowed and "string" not in allowed:
        return f'"\\n" {property_term(tool, schema)} end'
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f'"\\n" ({" | ".join(map(quoted, choices))}) end'
    return '"\\n" text'


QWEN3_CODER = ToolFormat(
    "qwen3_coder", (_FUNCTION,), _parser, _instruction, _write, _shape, tokens=(_OPEN, _CLOSE)
)
