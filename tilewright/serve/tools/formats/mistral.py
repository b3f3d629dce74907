"""Mistral: ``[TOOL_CALLS]`` before a list of JSON, or before ``name[ARGS]{...}``."""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Collection, Sequence

from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import (
    SPACE,
    Argued,
    CallRegion,
    Event,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)
from tilewright.serve.tools.json_calls import JsonRegion, is_name, merged
from tilewright.serve.tools.json_scanner import JsonScanner, escaped
from tilewright.serve.tools.shapes import (
    CallGrammar,
    ToolSpec,
    any_call,
    arguments_term,
    list_of_calls,
    object_rules,
    quoted,
)

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class _NamedRegion:
    """A region with JSON, or with a name and its arguments. The first character decides.

    Without a following ``[ARGS]``, only ``known`` words are names.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self.is_call = False
        self.rest: str | None = None
        self._inner: JsonRegion | None = None
        self._head = ""
        self._scanner: JsonScanner | None = None  # for the arguments
        self._is_broken = False

    def push(self, text: str) -> list[Event]:
        """See `CallRegion`."""
        events: list[Event] = []
        for at, character in enumerate(text):
            if self._inner is None and not self._head and character in "[{":
                self._inner = JsonRegion()
            if self._inner is not None:
                events = self._inner.push(text[at:])
                self.is_call, self.rest = self._inner.is_call, self._inner.rest
                return events
            if not self._step(character, events):
                self.rest = text[at:]
                break
        return merged(events)

    def flush(self) -> list[Event]:
        """See `CallRegion`."""
        if self._inner is None:
            return []
        events = self._inner.flush()
        self.is_call = self._inner.is_call
        return events

    def _step(self, character: str, events: list[Event]) -> bool:
        scanner = self._scanner
        if scanner is None:
            return self._name(character, events)
        if scanner.is_done:
            return False
        was = scanner.at
        self._is_broken = self._is_broken or not scanner.step(character)
        events.append(Argued(character if self._is_broken else escaped(character, was)))
        if scanner.is_done:
            events.append(ToolCallEnd())
        return True

    def _name(self, character: str, events: list[Event]) -> bool:
        """Read a character of the name and its markers, up to the brace of the arguments."""
        if character != "{":
            self._head += character if self._head else character.lstrip(SPACE)
            # a name, and the call's name
            return len(self._head) < 400 and character not in "}\n"
        name, _, between = self._head.partition("[")
        name = name.strip(SPACE)
        if not is_name(name) or not (between or name in self._known):
            return False
        if " " in name or (between and not f"[{between}".endswith(_ARGS)):
            return False
        self.is_call = True
        self._scanner = JsonScanner()
        events.append(ToolCallStart(name))
        return self._step(character, events)


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    known = frozenset(tool.name for tool in tools)

    def region(marker: str) -> CallRegion:
        return _NamedRegion(known)

    return ToolParser((_OPEN,), region)


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n[AVAILABLE_TOOLS]{listed(tools)}[/AVAILABLE_TOOLS]\n"
        f'To call some, answer with {_OPEN}[{{"name": a name, "arguments": an object}}].'
    )


def _write(calls: Sequence[Call]) -> str:
    texts = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _OPEN + json.dumps(texts, ensure_ascii=False)


def _shape(spec: ToShape) -> CallGrammar:
    if _ARGS not in spec.template:
        calls = list_of_calls(spec.is_parallel)
        return CallGrammar(_OPEN, (f'region: " "? {calls}', *object_rules(spec.tools, "arguments")))
    rules = ["region: call", any_call(spec.tools)]
    for at, tool in enumerate(spec.tools):
        rules.append(f"call_{at}: {quoted(tool.name)} {spec.term(_ARGS)} {arguments_term(tool)}")
    return CallGrammar(_OPEN, tuple(rules), repeats=True)


def _new_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def _known_id(call_id: str) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


MISTRAL = ToolFormat(
    "mistral",
    (_OPEN,),
    _parser,
    _instruction,
    _write,
    _shape,
    tokens=(_OPEN, _ARGS, _ID),
    new_id=_new_id,
    known_id=_known_id,
)
