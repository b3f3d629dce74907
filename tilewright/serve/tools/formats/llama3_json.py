"""Llama 3: an answer with ``{"name": ..., "parameters": {...}}``, several separated by ``;``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tilewright.serve.tools.base import Call, ToolFormat, ToShape, listed
from tilewright.serve.tools.events import ToolParser
from tilewright.serve.tools.json_calls import JsonRegion
from tilewright.serve.tools.shapes import CallGrammar, ToolSpec, object_rules

_TAG = "<|python_tag|>"
_MARK = '"parameters": dictionary of argument name'


def _parser(tools: Sequence[ToolSpec]) -> ToolParser:
    # other answers may also be JSON, so a call needs a known name
    known = frozenset(tool.name for tool in tools)

    def region(marker: str) -> JsonRegion:
        return JsonRegion(known=known, separator=";")

    return ToolParser((_TAG,), region, first="{")


def _instruction(tools: Sequence[ToolSpec]) -> str:
    return (
        f"You may call these functions:\n{listed(tools)}\nTo call one, answer with "
        '{"name": its name, "parameters": an object} and nothing else.'
    )


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
        for name, arguments in calls
    )


def _shape(spec: ToShape) -> CallGrammar:
    more = ' ("; " call)*' if spec.is_parallel else ""
    rules = object_rules(spec.tools, "parameters")
    return CallGrammar("", (f"region: call{more}", *rules), first="{")


LLAMA3_JSON = ToolFormat(
    "llama3_json", (_MARK, _TAG), _parser, _instruction, _write, _shape, tokens=(_TAG,)
)
