"""Llama 3: an answer that is ``{"name": ..., "parameters": {...}}``, several apart by ``;``."""

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
    # an answer may be JSON that calls nothing: only a known name makes it a call
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
