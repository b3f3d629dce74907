"""The grammar of an answer that calls functions: from its first token, or from a marker on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tilewright.runtime.grammar.spec import JSON_SCHEMA, LARK, GrammarSpec
from tilewright.serve.output.reasoning import CLOSE, begins_in_reasoning
from tilewright.serve.prompt.structured import behind_reasoning
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.asked import ToolsAsked
from tilewright.serve.tools.base import ToolFormat, ToShape
from tilewright.serve.tools.shapes import CallGrammar, Term, json_term, quoted
from tilewright.serve.web.errors import unsupported

_GAP = r"GAP: /[ \n]{1,4}/"
_TEXT = r"TEXT: /(.|\n)*/"


def term_of(coder: TextCoder) -> Term:
    """How a tokenizer's texts are written in Lark: special tokens by their ids."""

    def term(text: str) -> str:
        ids = coder.encode(text)
        is_special = len(ids) == 1 and not coder.decode(ids)
        return f"<[{ids[0]}]>" if is_special else quoted(text)

    return term


def call_grammar(
    asked: ToolsAsked,
    form: ToolFormat,
    coder: TextCoder,
    *,
    prompt: str,
    otherwise: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """What an answer must be so that its calls are those that were asked for.

    An answer that must call, in a format whose calls repeat, is free behind its first call: a blank
    there must not force another one. `CallReader` ends it at the first other text.
    An answer that need not call anything is free up to the marker of a call, or obeys
    ``otherwise``, a JSON schema. Where the format has no marker it is free altogether, which is
    None, or with a strict function if it does not begin as calls do. All of it comes behind the
    think block where there is one: see `behind_reasoning`.

    Raises:
        ApiError: 400 where an answer cannot be held to both.
    """
    tools = [tool for tool in asked.tools if asked.only in (None, tool.name)]
    is_parallel = asked.is_parallel and asked.only is None
    term = term_of(coder)
    shape = form.shape(ToShape(tools, is_parallel, coder.chat_template or "", term))
    marker = term(shape.opening) if shape.opening else ""
    repeats = shape.repeats and is_parallel
    if otherwise is not None and not asked.must_call and not marker:
        said = f"beside tools, which {form.name} does not mark; allowed: tool_choice none"
        raise unsupported("response_format", said)
    if asked.must_call and repeats:
        lines = [*_free(marker, has_begun=True, repeats=True), _GAP]
        lines[0] = lines[0].replace("start:", f"start: GAP? {marker}")
        return behind_reasoning(_spec(lines, shape), prompt, coder)
    if asked.must_call or otherwise is not None:
        more = f" (GAP? {marker} region)* GAP?" if repeats else ""
        lines = [f"start: GAP? {marker} region{more}", _GAP]
        if not asked.must_call and otherwise is not None:
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
    """Text with calls in it; ``has_begun``: the first marker has been read already."""
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
    """A JSON schema as a term.

    Raises:
        ApiError: 400 for another kind of grammar.
    """
    if spec.kind != JSON_SCHEMA:
        raise unsupported("structured_outputs", "beside tools; allowed: a JSON schema")
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError):  # it has been compiled before
        schema = {}
    return json_term(schema if isinstance(schema, dict) else {})
