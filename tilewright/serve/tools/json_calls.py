"""Parser for JSON calls: ``{"name": ..., "arguments": {...}}``, single, consecutive or in a list.

Arguments are streamed as the model writes them. The name distinguishes a call from other JSON, so
events begin after the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from tilewright.serve.output.stops import StopMatcher
from tilewright.serve.tools.events import SPACE, Argued, Event, ToolCallEnd, ToolCallStart
from tilewright.serve.tools.json_scanner import At, JsonScanner, escaped

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")
_OPEN_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(u[0-9a-fA-F]{0,3})?$")


def is_name(text: str) -> bool:
    """Return whether a text can be a function's name."""
    return 0 < len(text) <= 256 and text.isprintable()


def merged(events: list[Event]) -> list[Event]:
    """Join adjacent parts of arguments in a list of events."""
    found: list[Event] = []
    pieces: list[str] = []
    for event in events:
        if isinstance(event, Argued):
            pieces.append(event.text)
            continue
        found += _joined(pieces)
        pieces = []
        found.append(event)
    return found + _joined(pieces)


def _joined(pieces: list[str]) -> list[Event]:
    text = "".join(pieces)
    return [Argued(text)] if text else []


def _string(raw: str) -> str:
    """Return a JSON string's text. Unpaired surrogates become U+FFFD."""
    text: str = json.loads(raw, strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _ObjectField(Enum):
    """The current part of an object: a key, or a key's value."""

    NONE = auto()
    KEY = auto()
    NAME = auto()
    OBJECT = auto()
    TEXT = auto()  # arguments as a JSON string, or null
    OTHER = auto()


class _JsonCallParser:
    """An object's parser from its brace. ``known`` has the function names. None: any name."""

    def __init__(self, known: Collection[str] | None) -> None:
        self.is_call = False
        self.has_arguments = False
        self.raw: list[str] = []  # the text before it is known to be a call
        self._known = known
        self._scanner = JsonScanner()
        self._part = _ObjectField.NONE
        self._key = ""
        self._name: str | None = None
        self._text: list[str] = []  # of the current part
        self._early: list[str] = []  # arguments before the name

    @property
    def is_whole(self) -> bool:
        """Return whether the last brace is read."""
        return self._scanner.is_done

    def step(self, character: str, events: list[Event]) -> bool:
        """Take a character. Return False without taking it if the object is no call."""
        if self.is_call:
            return self._take(character, events)
        self.raw.append(character)
        if self._take(character, events):
            return True
        self.raw.pop()
        return False

    def _take(self, character: str, events: list[Event]) -> bool:
        scanner = self._scanner
        was, depth = scanner.at, scanner.depth
        if not scanner.step(character):
            return False
        if depth == 1 and character not in SPACE:
            if was in (At.KEY, At.FIRST_KEY):
                self._part, self._text = _ObjectField.KEY, []
            elif was is At.VALUE:
                self._part, self._text = self._value_part(character), []
                if self._part is _ObjectField.NONE:
                    return False
        if self._part is _ObjectField.OBJECT:
            self._argue(escaped(character, was), events)
        elif self._part in (_ObjectField.KEY, _ObjectField.NAME, _ObjectField.TEXT):
            self._text.append(character)
        is_part = self._part is not _ObjectField.NONE
        if is_part and scanner.depth == 1 and scanner.at in (At.COLON, At.BEHIND):
            return self._end_part(events)
        return not self.is_whole or self._end(events)

    def flush(self) -> list[Event]:
        """Return the events for cut arguments."""
        if self._part is not _ObjectField.TEXT or self._name is None or self._text[0] != '"':
            return []
        events: list[Event] = []
        self._argue(_string(_OPEN_ESCAPE.sub(r"\1", "".join(self._text)) + '"'), events)
        return events

    def _value_part(self, first: str) -> _ObjectField:
        """Return a value's field from its key and first character. NONE: no call."""
        if self._key in _ARGUMENTS and not self.has_arguments:
            return {"{": _ObjectField.OBJECT, '"': _ObjectField.TEXT, "n": _ObjectField.TEXT}.get(
                first, _ObjectField.NONE
            )
        if self._key in _NAMES and self._name is None:
            other = _ObjectField.NONE if self._key == "name" else _ObjectField.OTHER
            return _ObjectField.NAME if first == '"' else other
        return _ObjectField.OTHER

    def _end_part(self, events: list[Event]) -> bool:
        part, self._part = self._part, _ObjectField.NONE
        raw = "".join(self._text)
        if part is _ObjectField.KEY:
            self._key = _string(raw)
            # JSON without a marker is an answer at the first unknown key.
            return self._known is None or self._key in _KEYS
        elif part is _ObjectField.NAME:
            self._name = _string(raw)
            if not is_name(self._name) or (
                self._known is not None and self._name not in self._known
            ):
                return False
            if self._early:
                self._argue("".join(self._early), events)
        elif part is _ObjectField.TEXT:
            self._argue(_string(raw) if raw.startswith('"') else "{}", events)
        self.has_arguments |= part in (_ObjectField.OBJECT, _ObjectField.TEXT)
        return True

    def _argue(self, text: str, events: list[Event]) -> None:
        if self._name is None:
            self._early.append(text)
            return
        if not self.is_call:
            self.is_call = True
            events.append(ToolCallStart(self._name))
        events.append(Argued(text))

    def _end(self, events: list[Event]) -> bool:
        if self._name is None:
            return False
        if not self.is_call:
            self._argue("{}", events)
        events.append(ToolCallEnd())
        return True


class _State(Enum):
    OPENED = auto()
    ITEM = auto()
    OBJECT = auto()
    BETWEEN = auto()
    RAW = auto()
    OVER = auto()


class JsonRegion:
    """A region of JSON calls, see `CallRegion`.

    Args:
        close: closing marker, empty without a marker.
        known: function names. None: any JSON is a call.
        separator: characters between calls, in addition to white space.
    """

    def __init__(
        self, close: str = "", *, known: Collection[str] | None = None, separator: str = ""
    ) -> None:
        self.is_call = False
        self.rest: str | None = None
        self._close, self._known, self._separator = close, known, separator
        self._state = _State.OPENED
        self._is_list = False
        self._call = _JsonCallParser(known)
        self._back = ""  # consumed text that is plain if the region ends here
        self._matcher = StopMatcher((close,) if close else ())

    def push(self, text: str) -> list[Event]:
        """Take the next text and return the events that are certain."""
        events: list[Event] = []
        for at, character in enumerate(text):
            if not self._step(character, events):
                self.rest = self._back + text[at:]
                break
        else:
            self.rest = "" if self._state is _State.OVER else None
        return merged(events)

    def flush(self) -> list[Event]:
        """See `CallRegion`."""
        events: list[Event] = []
        if self._state is _State.RAW:
            events = [Argued(self._matcher.flush())]
        elif self._state is _State.OBJECT:
            events = self._call.flush()
            self.is_call |= self._call.is_call
        return merged(events)

    def _step(self, character: str, events: list[Event]) -> bool:
        """Take a character. Return False if the region ended before it."""
        if self._state is _State.OBJECT:
            return self._object(character, events)
        if self._state is _State.RAW:
            return self._broken(character, events)
        if self._state is _State.OVER:
            return False
        if character in SPACE and not self._back:
            return True
        if self._state is _State.BETWEEN:
            return self._between(character)
        if character in SPACE:
            self._back += character
            return True
        if character == "[" and self._state is _State.OPENED:
            self._is_list, self._state = True, _State.ITEM
            return True
        return character == "{" and self._begin(character)

    def _begin(self, character: str) -> bool:
        self._state, self._back, self._call = _State.OBJECT, "", _JsonCallParser(self._known)
        return self._call.step(character, [])

    def _object(self, character: str, events: list[Event]) -> bool:
        call = self._call
        goes_on = call.step(character, events)
        self.is_call |= call.is_call
        if goes_on:
            self._state = _State.BETWEEN if call.is_whole else self._state
            return True
        if not call.is_call:
            self._back = "".join(call.raw) if self.is_call else ""
            return False
        if call.has_arguments:
            events.append(ToolCallEnd())
            return False
        self._state = _State.RAW
        return self._broken(character, events)

    def _between(self, character: str) -> bool:
        if self._is_list:
            if character == "]":
                self._is_list = False
                return True
            if character == ",":
                self._state, self._back = _State.ITEM, character
            return character == ","
        if self._close and character == self._close[len(self._back)]:
            self._back += character
            if self._back == self._close:
                self._state, self._back = _State.OVER, ""
            return True
        if self._back:
            return False
        if self._separator and character in self._separator:
            self._state, self._back = _State.ITEM, character
            return True
        return character == "{" and self._begin(character)

    def _broken(self, character: str, events: list[Event]) -> bool:
        """Pass invalid JSON arguments unchanged up to the closing marker."""
        events.append(Argued(self._matcher.push(character)))
        if self._matcher.found is not None:
            events.append(ToolCallEnd())
            self._state = _State.OVER
        return True
