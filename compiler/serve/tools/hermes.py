"""Hermes, as Qwen and SmolLM2 write it: ``<tool_call>{"name": ..., "arguments": ...}``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tilewright.compiler.serve.tools.base import Call, Tool, ToolFormat, listed
from tilewright.compiler.serve.tools.events import ToolParser
from tilewright.compiler.serve.tools.json_calls import JsonRegion

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _parser(tools: Sequence[Tool]) -> ToolParser:
    return ToolParser((_OPEN,), lambda marker: JsonRegion(_CLOSE))


def _instruction(tools: Sequence[Tool]) -> str:
    return (
        f"You may call these functions:\n<tools>\n{listed(tools)}\n</tools>\nTo call one, answer "
        f'with {_OPEN}\n{{"name": its name, "arguments": an object}}\n{_CLOSE}, once for each call.'
    )


def _write(calls: Sequence[Call]) -> str:
    texts = [
        json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls
    ]
    return "\n".join(f"{_OPEN}\n{text}\n{_CLOSE}" for text in texts)


HERMES = ToolFormat("hermes", (_OPEN,), _parser, _instruction, _write, tokens=(_OPEN, _CLOSE))
