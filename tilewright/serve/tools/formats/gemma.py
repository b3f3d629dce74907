"""Gemma: Python calls, ``[f(a=1), g(b="x")]`` as the whole answer or in a tool_code fence."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from enum import Enum, auto

from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import (
    SPACE,
    Argued,
    Event,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from tilewright.serve.tools.json_calls import merged
from tilewright.serve.tools.literals import json_of
from tilewright.serve.tools.schema import properties
from tilewright.serve.tools.shapes import (
    CallGrammar,
    ToolSpec,
    any_call,
    is_needed,
    list_of_calls,
    property_term,
    quoted,
)

_FENCE, _CLOSE = "```tool_code", "```"
_PAIRS = {")": "(", "]": "[", "}": "{"}


class _PythonLiteral:
    """Collects a value up to its comma or parenthesis."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._open: list[str] = []
        self._quote = ""  # of the current string: a single or a triple quote
        self._run = ""  # consecutive quotes, which may form a triple quote
        self._is_escaped = False

    def ends_at(self, character: str) -> bool:
        """Take a character, unless it ends the value."""
        if self._run and not self._quote and character != self._run[0]:
            # A single quote has opened a string, two quotes are an empty string.
            self._quote, self._run = (self._run if len(self._run) == 1 else ""), ""
        if not self._quote and not self._run and not self._open and character in ",)":
            return True
        self.text.append(character)
        if self._quote:
            self._within(character)
        elif character in "\"'":
            self._run += character
            if len(self._run) == 3:
                self._quote, self._run = self._run, ""
        elif character in "([{":
            self._open.append(character)
        elif self._open and _PAIRS.get(character) == self._open[-1]:
            self._open.pop()
        return False

    def cut_short(self) -> str:
        """Return the received part as JSON, if the text ends within the value."""
        text = "".join(self.text).strip(SPACE)
        if self._open:
            return text
        if self._run and not self._quote:
            return '"'
        whole = json_of(text.removesuffix("\\" * self._is_escaped) + self._quote)
        return whole[:-1] if whole.startswith('"') else whole

    def _within(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped, self._run = True, ""
        elif character == self._quote[0]:
            self._run += character
            if len(self._run) == len(self._quote):
                self._quote = self._run = ""
        else:
            self._run = ""


class _GemmaState(Enum):
    OPENED = auto()  # a list or a name
    NAME = auto()
    KEY = auto()
    VALUE = auto()
    BEHIND = auto()  # after a call
    CLOSING = auto()  # after the list
    OVER = auto()


class _GemmaRegion:
    """See `CallRegion`. Reads calls of ``known`` functions only: the text may be any Python."""

    def __init__(self, known: Collection[str], marker: str) -> None:
        self.is_call = False
        self.rest: str | None = None
        self._known, self._is_fenced = known, bool(marker)
        self._state = _GemmaState.OPENED
        self._in_list = False
        self._pending = ""  # a name, a key or the closing fence
        self._raw: list[str] = []  # since the last call
        self._name = ""
        self._num_given = -1  # arguments of the current call; -1: before its start event
        self._value = _PythonLiteral()

    def push(self, text: str) -> list[Event]:
        """See `CallRegion`."""
        events: list[Event] = []
        for at, character in enumerate(text):
            self._raw.append(character)
            if not self._step(character, events):
                raw = "".join(self._raw[:-1]) if self.is_call else ""
                self.rest = raw + text[at:]
                break
        else:
            self.rest = "" if self._state is _GemmaState.OVER else None
        return merged(events)

    def flush(self) -> list[Event]:
        """See `CallRegion`."""
        if self._num_given < 0 or self._state is not _GemmaState.VALUE or not self._value.text:
            return []
        return [Argued(self._value.cut_short())]

    def _step(self, character: str, events: list[Event]) -> bool:
        """Take a character. Return False if the region ended before it."""
        if self._state is _GemmaState.VALUE:
            if self._value.ends_at(character):
                events.append(Argued(json_of("".join(self._value.text))))
                self._state = _GemmaState.KEY
                return character == "," or self._end(events)
            return True
        if self._state is _GemmaState.NAME:
            return self._read_name(character)
        if self._state is _GemmaState.KEY:
            return self._read_key(character, events)
        return self._state is not _GemmaState.OVER and self._outside(character)

    def _outside(self, character: str) -> bool:
        """Read text before, between and after calls."""
        if self._pending:  # part of the fence
            self._pending += character
            if self._pending == _CLOSE:
                self._state, self._pending, self._raw = _GemmaState.OVER, "", []
            return character == "`"
        if self._is_fenced and character == "`":
            self._pending = character
            return True
        if character in SPACE:
            return True
        if self._state is _GemmaState.OPENED and character == "[" and not self._in_list:
            self._in_list = True
        elif self._state is _GemmaState.BEHIND and character == "]" and self._in_list:
            self._state, self._raw = _GemmaState.CLOSING, []
        elif self._state is _GemmaState.BEHIND and character == "," and self._in_list:
            self._state = _GemmaState.OPENED
        elif _is_part(character) and (
            self._state is _GemmaState.OPENED
            or (self._state is _GemmaState.BEHIND and not self._in_list)
        ):
            self._state, self._pending = _GemmaState.NAME, character
        else:
            return False
        return True

    def _read_name(self, character: str) -> bool:
        if character == "(" and self._pending in self._known:
            self._name, self._pending, self._state = self._pending, "", _GemmaState.KEY
            self._num_given = -1
            return True
        self._pending += character
        return _is_part(character)

    def _read_key(self, character: str, events: list[Event]) -> bool:
        if character == ")" and not self._pending:
            return self._end(events)
        if character == "=" and self._pending.strip(SPACE).isidentifier():
            key, self._pending = self._pending.strip(SPACE), ""
            self._say(events)
            events.append(Argued(f"{', ' if self._num_given else '{'}{json.dumps(key)}: "))
            self._num_given += 1
            self._state, self._value = _GemmaState.VALUE, _PythonLiteral()
            return True
        if self._pending or character not in SPACE:
            self._pending += character
        if _is_part(character) or character in SPACE:
            return True
        if self._num_given >= 0:  # an argument without a name ends the call
            pending = self._pending
            self._end(events)
            self._raw = list(pending)
        return False

    def _say(self, events: list[Event]) -> None:
        if self._num_given < 0:
            self._num_given, self.is_call = 0, True
            events.append(ToolCallStart(self._name))

    def _end(self, events: list[Event]) -> bool:
        self._say(events)
        events += [Argued("}" if self._num_given else "{}"), ToolCallEnd()]
        self._state, self._num_given = _GemmaState.BEHIND, -1
        self._raw, self._pending = [], ""
        return True


def _is_part(character: str) -> bool:
    """Return whether a name may contain the character."""
    return character.isalnum() or character in "_.-"


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    known = frozenset(tool.name for tool in tools)
    return ToolParser((_FENCE,), lambda marker: _GemmaRegion(known, marker), first="[")


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n{listed(tools)}\nTo call some, answer with a Python list "
        "of calls with named arguments and nothing else, as [f(a=1), g(b='x')]."
    )


def _write(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
        ]
        texts.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(texts)}]"


def _shape(spec: ToShape) -> CallGrammar:
    rules = [any_call(spec.tools)]
    for at, tool in enumerate(spec.tools):
        rules.append(f'call_{at}: {quoted(f"{tool.name}(")} first_{at}_0 ")"')
        rules += _argument_rules(tool, at)
    return CallGrammar("", (f"region: {list_of_calls(spec.is_parallel)}", *rules), first="[")


def _argument_rules(tool: ToolSpec, at: int) -> list[str]:
    """Return rules for arguments from the Nth on, ``first_AT_N`` and with a comma ``more_AT_N``."""
    rules = []
    fields = [(key, each) for key, each in properties(tool.schema).items() if key.isidentifier()]
    for place, (key, schema) in enumerate(fields):
        value = f"{property_term(tool, schema)} more_{at}_{place + 1}"
        for state, comma in (("first", ""), ("more", ", ")):
            skipped = "" if is_needed(tool, key) else f" | {state}_{at}_{place + 1}"
            rules.append(f"{state}_{at}_{place}: {quoted(f'{comma}{key}=')} {value}{skipped}")
    return [*rules, f'first_{at}_{len(fields)}: ""', f'more_{at}_{len(fields)}: ""']


GEMMA = ToolFormat("gemma", ("func_name1(", _FENCE), _parser, _instruction, _write, _shape)
