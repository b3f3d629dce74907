"""Answer grammars with tool calls, from the first token or from a marker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tilewright.runtime.grammar.spec import JSON_SCHEMA, LARK, GrammarSpec
from tilewright.serve.output.reasoning import CLOSE, begins_in_reasoning
from tilewright.serve.prompt.structured import behind_reasoning
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.base import ToolFormat, ToShape
from tilewright.serve.tools.shapes import CallGrammar, Term, json_term, quoted
from tilewright.serve.tools.tool_request import RequestedTools
from tilewright.serve.web.errors import unsupported

_GAP = r"GAP: /[ \n]{1,4}/"
_TEXT = r"TEXT: /(.|\n)*/"


def term_of(coder: TextCoder) -> Term:
    """Return a function that writes text in Lark. Special tokens are written as ids."""

    def term(text: str) -> str:
        ids = coder.encode(text)
        is_special = len(ids) == 1 and not coder.decode(ids)
        return f"<[{ids[0]}]>" if is_special else quoted(text)

    return term


def call_grammar(
    requested: RequestedTools,
    form: ToolFormat,
    coder: TextCoder,
    *,
    prompt: str,
    otherwise: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """Return the grammar that enforces the tool call schemas, or None.

    After the first call, an answer that must call is free if the format repeats calls: white space
    must not force another call. `CallReader` ends the answer at other text.
    Other answers are free up to a call's marker, or obey the JSON schema ``otherwise``. In a
    format without a marker, they are free: the result is None, or for strict functions a grammar
    of texts with another beginning. The grammar begins after the think block, see
    `behind_reasoning`.

    Raises:
        ApiError: 400 if calls and ``otherwise`` cannot both be enforced.
    """
    tools = [tool for tool in requested.tools if requested.only in (None, tool.name)]
    is_parallel = requested.is_parallel and requested.only is None
    term = term_of(coder)
    shape = form.shape(ToShape(tools, is_parallel, coder.chat_template or "", term))
    marker = term(shape.opening) if shape.opening else ""
    repeats = shape.repeats and is_parallel
    if otherwise is not None and not requested.must_call and not marker:
        said = f"beside tools, which {form.name} does not mark; allowed: tool_choice none"
        raise unsupported("response_format", said)
    if requested.must_call and repeats:
        lines = [*_free(marker, has_begun=True, repeats=True), _GAP]
        lines[0] = lines[0].replace("start:", f"start: GAP? {marker}")
        return behind_reasoning(_spec(lines, shape), prompt, coder)
    if requested.must_call or otherwise is not None:
        more = f" (GAP? {marker} region)* GAP?" if repeats else ""
        lines = [f"start: GAP? {marker} region{more}", _GAP]
        if not requested.must_call and otherwise is not None:
            lines[0] += f" | {_json(otherwise)}"
        return behind_reasoning(_spec(lines, shape), prompt, coder)
    if not shape.opening:
        if not any(tool.is_strict for tool in tools):
            return None
        lines = ["start: GAP? (region | FREE)?", _GAP, rf"FREE: /[^ \n\{shape.first}](.|\n)*/"]
        return behind_reasoning(_spec(lines, shape), prompt, coder)
    is_thinking = begins_in_reasoning(prompt)
    lines = _free(marker, has_begun=not is_thinking, repeats=repeats)
    return replace(_spec(lines, shape), behind=CLOSE if is_thinking else shape.opening)


def _free(marker: str, *, has_begun: bool, repeats: bool) -> list[str]:
    """Return grammar rules for text with tool calls.

    ``has_begun``: the output starts inside a call.
    """
    count = "*" if repeats else "" if has_begun else "?"
    calls = [f"called{count}"] if count else []
    lines = [f"start: {' '.join([*(['region'] if has_begun else []), *calls])} TEXT", _TEXT]
    if not calls:
        return lines
    if marker.startswith("<["):
        return [*lines, f"called: TEXT {marker} region"]
    return [*lines, "called: opened region", f"opened[lazy]: TEXT {marker}"]


def _spec(lines: Sequence[str], shape: CallGrammar) -> GrammarSpec:
    return GrammarSpec(kind=LARK, text="\n".join(["%llguidance {}", *lines, *shape.rules]))


def _json(spec: GrammarSpec) -> str:
    """Return a JSON schema as a term.

    Raises:
        ApiError: 400 for another type of grammar.
    """
    if spec.kind != JSON_SCHEMA:
        raise unsupported("structured_outputs", "beside tools; allowed: a JSON schema")
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError):  # unlikely, as the grammar has been compiled
        schema = {}
    return json_term(schema if isinstance(schema, dict) else {})
