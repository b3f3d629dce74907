"""Hermes, as Qwen and SmolLM2 write it: ``<tool_call>{"name": ..., "arguments": ...}``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import ToolParser
from tilewright.serve.tools.json_calls import JsonRegion
from tilewright.serve.tools.shapes import CallGrammar, ToolSpec, list_of_calls, object_rules

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    return ToolParser((_OPEN,), lambda marker: JsonRegion(_CLOSE))


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n<tools>\n{listed(tools)}\n</tools>\nTo call one, answer "
        f'with {_OPEN}\n{{"name": its name, "arguments": an object}}\n{_CLOSE}, once for each call.'
    )


def _write(calls: Sequence[Call]) -> str:
    texts = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    return "\n".join(f"{_OPEN}\n{text}\n{_CLOSE}" for text in texts)


def _shape(spec: ToShape) -> CallGrammar:
    rules, close = object_rules(spec.tools, "arguments"), spec.term(_CLOSE)
    if f"{_OPEN}[" in spec.template:
        listed_calls = list_of_calls(spec.is_parallel)
        return CallGrammar(_OPEN, (f'region: {listed_calls} "\\n"? {close}', *rules))
    return CallGrammar(_OPEN, (f'region: "\\n"? call "\\n" {close}', *rules), repeats=True)


HERMES = ToolFormat(
    "hermes", (_OPEN,), _parser, _instruction, _write, _shape, tokens=(_OPEN, _CLOSE)
)
