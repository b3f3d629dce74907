"""Grammars of calls: what each format writes obeys its own, what was not asked for does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.serve.scripted import END, byte_coder
from tilewright.runtime.grammar.matchers import Grammars
from tilewright.runtime.grammar.spec import JSON_SCHEMA, REGEX, GrammarSpec
from tilewright.serve.tools.formats.table import FORMATS
from tilewright.serve.tools.grammars import call_grammar
from tilewright.serve.tools.tool_request import read_tools
from tilewright.serve.web.errors import ApiError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/Days"},
        "when": {"enum": ["today", "now"]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer"}},
}
GIVEN: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "now", "arguments": {}}'
PARIS: tuple[str, Mapping[str, Any]] = ("weather", {"city": 'é <b>"\n', "days": 3, "when": "now"})
NOW: tuple[str, Mapping[str, Any]] = ("now", {})


def hold(
    name: str,
    text: str,
    *,
    template: str = "x",
    prompt: str = "",
    otherwise: GrammarSpec | None = None,
    **asked: Any,
) -> str:
    """What becomes of a text: ``free``, ``met``, ``open``, or how much of it is allowed."""
    coder = byte_coder(template)
    given = GIVEN
    if asked.get("strict"):
        given = [{**each, "function": {**each["function"], "strict": True}} for each in GIVEN]
    tools = read_tools(given, asked.get("choice"), asked.get("parallel"))
    assert tools is not None
    spec = call_grammar(tools, FORMATS[name], coder, prompt=prompt, otherwise=otherwise)
    if spec is None:
        return "free"
    grammars = Grammars(
        lambda: coder._backend.to_str(), end_tokens=(END,), vocab_size=coder.vocab_size
    )
    grammars.check(spec)
    matcher, tokens = grammars.matcher(spec, (END,)), coder.encode(text)
    for count in range(1, len(tokens) + 1):
        matcher.follow(tokens[:count])
        if matcher.error:
            return coder.decode(tokens[: count - 1], skip_special=False)
    return "free" if matcher.is_free else "met" if matcher.is_met else "open"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_written_obeys_and_nothing_else(name: str) -> None:
    write = FORMATS[name].write
    for calls in ([PARIS], [NOW, PARIS], [("weather", {"city": ""})]):
        text = write(calls)
        assert hold(name, text, choice="required") == "met"
        thought = f"hm</think>\n\n{text}"
        assert hold(name, thought, choice="required", prompt="<think>") == "met"
    only = {"type": "function", "function": {"name": "now"}}
    assert hold(name, write([NOW]), choice=only) == "met"
    refused: list[tuple[str, dict[str, Any]]] = [
        (write([PARIS]), {"choice": only}),
        (write([NOW, NOW]), {"choice": "required", "parallel": False}),
        (write([("weather", {"days": 3})]), {"choice": "required"}),
        ("I would", {"choice": "required"}),
    ]
    for text, asked in refused:
        assert hold(name, text, **asked) not in ("met", "open", "free")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_line_end_behind_a_call_forces_no_other_call(name: str) -> None:
    once = FORMATS[name].write([NOW])
    assert hold(name, f"{once}\n", choice="required") == "met"
    assert hold(name, f"{once}\n{once}", choice="required") == "met"
    assert hold(name, f"{once}\nThe", choice="required") == "met"
    bad = FORMATS[name].write([("weather", {"days": 3})])
    assert hold(name, f"{once}\n{bad}", choice="required") not in ("met", "open", "free")
    assert hold(name, f"{once}\n", choice="required", parallel=False) == once


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_answer_is_free_up_to_a_call(name: str) -> None:
    form = FORMATS[name]
    assert hold(name, "I would not.") == "free"
    if name in ("llama3_json", "gemma"):
        for text in ("So {} [] it is.", "", f" {form.write([PARIS])}"):
            assert hold(name, text, strict=True) == "met"
        opened = form.write([PARIS])[: form.write([PARIS]).index("weather")]
        assert hold(name, f"{opened}weather", strict=True) == "open"
        assert hold(name, f"{opened}x", strict=True) == opened
        return  # nothing else tells a call from text before its name
    text = f"Well. {form.write([PARIS])}"
    assert hold(name, text) == hold(name, f"{text}\nSo.") == "met"
    assert hold(name, f"a{form.write([('other', {})])}") not in ("met", "open", "free")
    opened = text[: text.index("weather")]
    assert hold(name, opened) == "open"
    assert hold(name, f"hm</think>{text}", prompt="<think>") == "met"
    assert hold(name, f"hm</think>{opened}x", prompt="<think>") == f"hm</think>{opened}"


@pytest.mark.parametrize(
    ("name", "template", "text"),
    [
        ("mistral", "[ARGS]", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "x"}'),
        (
            "phi4",
            '<|tool_call|>{"name"',
            '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
        ),
        ("phi4", "functools[", 'functools[{"name": "now", "arguments": {}}]'),
        ("hermes", "<tool_call>[", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>'),
    ],
)
def test_the_template_tells_between_ways_of_a_format(name: str, template: str, text: str) -> None:
    assert hold(name, text, template=template, choice="required") == "met"
    assert hold(name, text, template="x", choice="required") not in ("met", "open")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_beside_a_schema_an_answer_calls_or_obeys_it(name: str) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    spec = GrammarSpec(kind=JSON_SCHEMA, text=schema)
    if name in ("llama3_json", "gemma"):
        with pytest.raises(ApiError, match="does not mark"):
            hold(name, "", otherwise=spec)
        return
    assert hold(name, '{"a": 1}', otherwise=spec) == "met"
    assert hold(name, FORMATS[name].write([PARIS]), otherwise=spec) == "met"
    assert hold(name, "So.", otherwise=spec) == ""
    with pytest.raises(ApiError, match="allowed: a JSON schema"):
        hold(name, "", otherwise=GrammarSpec(kind=REGEX, text="a"))
