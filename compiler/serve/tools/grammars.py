"""The grammar of an answer that calls functions: from its first token, or from a marker on."""

from __future__ import annotations

from tilewright.compiler.runtime.grammar import LARK, GrammarSpec
from tilewright.compiler.serve.texts import TextCoder
from tilewright.compiler.serve.tools.asked import ToolsAsked
from tilewright.compiler.serve.tools.base import ToolFormat, ToShape
from tilewright.compiler.serve.tools.shapes import Term, quoted

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
    asked: ToolsAsked, form: ToolFormat, coder: TextCoder, *, behind: str = ""
) -> GrammarSpec | None:
    """What an answer must be so that its calls are those that were asked for.

    ``behind``: text that comes before all of it, as the end of reasoning. An answer that need not
    call anything is free up to the marker of a call; None where the format has no marker.
    """
    tools = [tool for tool in asked.tools if asked.only in (None, tool.name)]
    is_parallel = asked.is_parallel and asked.only is None
    term = term_of(coder)
    shape = form.shape(ToShape(tools, is_parallel, coder.chat_template or "", term))
    marker = term(shape.opening) if shape.opening else ""
    repeats = shape.repeats and is_parallel
    if asked.must_call:
        more = f" (GAP? {marker} region)*" if repeats else ""
        lines = [f"start: GAP? {marker} region{more}", _GAP]
    elif not shape.opening:
        return None
    else:
        is_text = marker.startswith('"')
        trigger = ["called: opened region"] if is_text else [f"called: TEXT {marker} region"]
        if is_text:
            trigger.append(f"opened[lazy]: TEXT {marker}")
        first = "called*" if behind else "region called*"
        if not repeats:
            first = "called?" if behind else "region"
            trigger = trigger if behind else []
        lines = [f"start: {first} TEXT", *trigger, _TEXT]
        behind = behind or shape.opening
    text = "\n".join(["%llguidance {}", *lines, *shape.rules])
    return GrammarSpec(kind=LARK, text=text, behind=behind)
