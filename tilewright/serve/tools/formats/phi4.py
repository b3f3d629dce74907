"""Phi-4: a list of ``{"name": ..., "arguments": {...}}`` in ``<|tool_call|>`` or ``functools``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import ToolParser
from tilewright.serve.tools.json_calls import JsonRegion
from tilewright.serve.tools.shapes import CallGrammar, ToolSpec, list_of_calls, object_rules

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"
_WORD = "functools"


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    known = frozenset(tool.name for tool in tools)

    def region(marker: str) -> JsonRegion:
        # the word may stand in any text about Python
        return JsonRegion(_CLOSE) if marker == _OPEN else JsonRegion(known=known)

    return ToolParser((_OPEN, _WORD), region)


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n<|tool|>{listed(tools)}<|/tool|>\nTo call some, answer "
        f'with {_OPEN}[{{"name": a name, "arguments": an object}}]{_CLOSE}.'
    )


def _write(calls: Sequence[Call]) -> str:
    texts = [{"name": name, "arguments": given} for name, given in calls]
    return f"{_OPEN}{json.dumps(texts, ensure_ascii=False)}{_CLOSE}"


def _shape(given: ToShape) -> CallGrammar:
    rules, calls = object_rules(given.tools, "arguments"), list_of_calls(given.is_parallel)
    if f"{_WORD}[" in given.template:
        return CallGrammar(_WORD, (f"region: {calls}", *rules))
    if f"{_OPEN}{{" in given.template:
        return CallGrammar(_OPEN, (f"region: call {given.term(_CLOSE)}", *rules), repeats=True)
    return CallGrammar(_OPEN, (f"region: {calls} {given.term(_CLOSE)}", *rules))


PHI4 = ToolFormat(
    "phi4",
    (_OPEN, "<|tool|>", f"{_WORD}["),
    _parser,
    _instruction,
    _write,
    _shape,
    tokens=(_OPEN, _CLOSE),
)
