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
        # any text about Python may have this word
        return JsonRegion(_CLOSE) if marker == _OPEN else JsonRegion(known=known)

    return ToolParser((_OPEN, _WORD), region)


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n<|tool|>{listed(tools)}<|/tool|>\nTo call some, answer "
        f'with {_OPEN}[{{"name": a name, "arguments": an object}}]{_CLOSE}.'
    )


def _write(calls: Sequence[Call]) -> str:
    texts = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"{_OPEN}{json.dumps(texts, ensure_ascii=False)}{_CLOSE}"


def _shape(spec: ToShape) -> CallGrammar:
    rules, calls = object_rules(spec.tools, "arguments"), list_of_calls(spec.is_parallel)
    if f"{_WORD}[" in spec.template:
        return CallGrammar(_WORD, (f"region: {calls}", *rules))
    if f"{_OPEN}{{" in spec.template:
        return CallGrammar(_OPEN, (f"region: call {spec.term(_CLOSE)}", *rules), repeats=True)
    return CallGrammar(_OPEN, (f"region: {calls} {spec.term(_CLOSE)}", *rules))


PHI4 = ToolFormat(
    "phi4",
    (_OPEN, "<|tool|>", f"{_WORD}["),
    _parser,
    _instruction,
    _write,
    _shape,
    tokens=(_OPEN, _CLOSE),
)
