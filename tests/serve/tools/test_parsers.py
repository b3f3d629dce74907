"""Tool calls in answers, by format. Text without calls stays text, and splits change nothing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.serve.tools.events import Argued, ContentDelta, Event, ToolCallEnd, ToolCallStart
from tilewright.serve.tools.formats.table import FORMATS
from tilewright.serve.tools.shapes import ToolSpec

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "when": {"$ref": "#/$defs/Day"},
    },
    "$defs": {"Day": {"enum": ["today", "tomorrow"]}},
}
TOOLS = (ToolSpec("weather", schema=SCHEMA), ToolSpec("now", schema=SCHEMA))
Found = tuple[str, list[tuple[str, str, bool]]]


def read(name: str, pieces: Sequence[str], *, must_call: bool = False) -> Found:
    """Return the content and the calls: name, arguments, and whether the call is complete."""
    parser = FORMATS[name].parser(TOOLS)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    content, calls = "", []
    for event in [*events, *parser.flush(must_call=must_call)]:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, "", False))
        elif isinstance(event, Argued):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text, False)
        else:
            assert isinstance(event, ToolCallEnd)
            calls[-1] = (*calls[-1][:2], True)
    return content, calls


def call(name: str, **arguments: Any) -> tuple[str, str, bool]:
    return name, json.dumps(arguments, ensure_ascii=False), True


OBJECT = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS = call("weather", city="Paris")
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
)
BOTH = [PARIS, call("now")]
CASES: list[tuple[str, str, str, list[tuple[str, str, bool]]]] = [
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{OBJECT}\n</tool_call>"
        '\n<tool_call>\n{"name": "now"}\n</tool_call>\n',
        "Let me see.",
        BOTH,
    ),
    (
        "hermes",
        '<tool_call>[\n{"arguments": {"city": "Paris"}, "name": "weather"},\n'
        '{"name": "now", "arguments": "{}", "id": 7}]</tool_call>Done.',
        "Done.",
        BOTH,
    ),
    (
        "hermes",  # arguments as text, with a newline in a string
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'
        '{"name": "weather", "arguments": {"city": "\n"}}</tool_call>',
        "",
        [PARIS, ("weather", '{"city": "\\u000a"}', True)],
    ),
    (
        "hermes",  # invalid JSON arguments stay unchanged
        '<tool_call>{"name": "weather", "arguments": {\'city\': 1}}</tool_call> so',
        "so",
        [("weather", "{'city': 1}}", True)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        "",
        [("weather", '{"city": "Pa', False)],
    ),
    ("hermes", 'Text <tool_call>{"name": "wea', 'Text <tool_call>{"name": "wea', []),
    (
        "hermes",
        "a <tool_call> is a <tool_call>[] or {} ",
        "a <tool_call> is a <tool_call>[] or {} ",
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', "<tool_call>", [call("now")]),
    ("hermes", '<tool_call>{"name": "now"} {"x": <tool_call>', '{"x": <tool_call>', [call("now")]),
    ("qwen3_coder", XML.format("Paris"), "", [PARIS]),
    (
        "qwen3_coder",
        "I look.\n" + XML.format('a\n"b"\n'),
        "I look.",
        [call("weather", city='a\n"b"\n')],
    ),
    (
        "qwen3_coder",  # values by schema, a missing tag, and no tool_call around
        "<function=weather><parameter=days>3</parameter><parameter=tags>[1, 2]</parameter>"
        "<parameter=note>null</parameter><parameter=when>today</parameter>"
        "<parameter=city>5\n<parameter=other>x</parameter></function>"
        "<function=now></function></tool_call>",
        "",
        [
            call("weather", days=3, tags=[1, 2], note=None, when="today", city="5", other="x"),
            call("now"),
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Pa",
        "",
        [("weather", '{"city": "Pa', False)],
    ),
    ("qwen3_coder", "<tool_call><function=now>oops</function>", "oops</function>", [call("now")]),
    ("qwen3_coder", "if a <tool_call> b <function= c\n", "if a <tool_call> b <function= c\n", []),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now"}',
        "",
        BOTH,
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "function": "now", "parameters": {}}',
        "",
        [call("now")],
    ),
    ("llama3_json", ' {"name": "Bob", "parameters": {}}', ' {"name": "Bob", "parameters": {}}', []),
    (
        "llama3_json",
        'So: {"name": "now", "parameters": {}}',
        'So: {"name": "now", "parameters": {}}',
        [],
    ),
    ("llama3_json", '{"name": "now"}; and', "; and", [call("now")]),
    (
        "mistral",
        f'[TOOL_CALLS] [{OBJECT}, {{"name": "now", "id": "a"}}]',
        "",
        BOTH,
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]x[ARGS]{}',
        "Yes.",
        BOTH,
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "Pa', "", [("weather", '{"city": "Pa', False)]),
    ("mistral", "a [TOOL_CALLS] is {x}", "a [TOOL_CALLS] is {x}", []),
    (
        "phi4",
        f'<|tool_call|>[{OBJECT}, {{"name": "now"}}]<|/tool_call|>',
        "",
        BOTH,
    ),
    ("phi4", 'functools[{"name": "now", "arguments": {}}]', "", [call("now")]),
    ("phi4", 'import functools\n[{"name": "x"}]', 'import functools\n[{"name": "x"}]', []),
    ("gemma", '[weather(city="Paris"), now()]', "", BOTH),
    ("gemma", "Look:\n```tool_code\nweather(city = 'Paris')\nnow()\n```\nSo.", "Look:\nSo.", BOTH),
    (
        "gemma",
        "[weather(days=-2, tags=[\"a)\", (1,)], note=None, city='''it's, \"so\"''', when=\"\")]",
        "",
        [call("weather", days=-2, tags=["a)", [1]], note=None, city='it\'s, "so"', when="")],
    ),
    ("gemma", '[weather(days=1, city="Pa', "", [("weather", '{"days": 1, "city": "Pa', False)]),
    ("gemma", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("gemma", "```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
    ("gemma", '[now(), weather("Paris")] ', ', weather("Paris")]', [call("now")]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_told_from_text(
    name: str, text: str, content: str, calls: list[tuple[str, str, bool]]
) -> None:
    assert read(name, [text]) == (content, calls)
    assert read(name, list(text)) == (content, calls)


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "weather",
        "now",
        ">",
        "</function>",
        "name",
    ),
    *(
        "<parameter=",
        "city",
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "{",
        "}",
    ),
    *(
        "<|tool_call|>",
        "<|/tool_call|>",
        "functools",
        "```tool_code",
        "```",
        "[",
        "]",
        "(",
        ")",
    ),
    *('"name": "now"', '{"name": "weather", "arguments": {', '"city": "x"', '"arguments": '),
    *("weather(", "city=", "'", '"', ",", ";", ":", "=", "\\", "\n", " ", "1", "null", "é"),
]
MIXED = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=2)), max_size=16).map("".join)
PLACES = st.lists(st.integers(0, 300), max_size=12)
NAMES = st.sampled_from(sorted(FORMATS))


def cut(text: str, places: Sequence[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(marks)]


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = FORMATS["llama3_json"].parser(TOOLS)
    said = [event.text for event in parser.push('{"answer": ') if isinstance(event, ContentDelta)]
    assert "".join(said) == '{"answer":'


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, MIXED, PLACES)
def test_any_cut_gives_the_same_events(name: str, text: str, places: list[int]) -> None:
    content, calls = read(name, [text])
    assert read(name, cut(text, places)) == read(name, list(text)) == (content, calls)
    assert all(is_whole for _, _, is_whole in calls[:-1])
    if not calls:
        assert content == text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_many_texts_are_read_alike_however_they_are_cut(name: str) -> None:
    chooser = random.Random(name)
    for _ in range(200_000 // len(FORMATS)):
        text = "".join(chooser.choices(PARTS, k=chooser.randrange(1, 16)))
        content, calls = read(name, [text])
        places = [chooser.randrange(200) for _ in range(chooser.randrange(1, 8))]
        assert read(name, cut(text, places)) == (content, calls), (text, places)
        assert calls or content == text, text


WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.one_of(WORDS, st.integers(-(10**20), 10**20), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS,
        "days": st.integers(-(10**20), 10**20),
        "tags": st.lists(VALUES, max_size=3),
        "note": st.none(),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "now"]), GIVEN), min_size=1, max_size=3)
TEXTS = st.sampled_from(["", "Let me see.", "a < b [1] {} `x`", "é\n\nso"])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, TEXTS, CALLS, PLACES)
def test_calls_that_were_written_are_read_again(
    name: str, before: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    """The parser reads calls written for earlier turns."""
    written = FORMATS[name].write(calls)
    if name in ("llama3_json", "gemma"):
        before = ""  # the whole answer is a call
    content, found = read(name, cut(f"{before}\n{written}" if before else written, places))
    assert content == before
    assert [(each, json.loads(text)) for each, text, _ in found] == calls
    assert all(is_whole for *_, is_whole in found)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, TEXTS, CALLS, PLACES, st.integers(0, 2000), st.booleans())
def test_cut_calls_leave_no_markup_and_come_once(
    name: str,
    before: str,
    calls: list[tuple[str, dict[str, Any]]],
    places: list[int],
    end: int,
    must_call: bool,
) -> None:
    """The calls and content of a cut answer are a prefix of the whole."""
    written = FORMATS[name].write(calls)
    if name in ("llama3_json", "gemma") or must_call:
        before = ""
    whole = f"{before}\n{written}" if before else written
    text = whole[: end % (len(whole) + 1)]
    content, found = read(name, cut(text, places), must_call=must_call)
    assert [each for each, *_ in found] == [each for each, _ in calls[: len(found)]]
    assert [json.loads(given) for _, given, is_whole in found if is_whole] == [
        given for _, given in calls[: sum(is_whole for *_, is_whole in found)]
    ]
    assert content == (before if found or must_call else text)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_cut_at_every_character_leaves_no_markup(name: str) -> None:
    """Cut an answer in each format at every character."""
    given = {"city": "Paris", "days": 3, "tags": ["a"], "note": None}
    written = FORMATS[name].write([("weather", given), ("now", {})])
    for end in range(len(written) + 1):
        content, found = read(name, [written[:end]])
        assert content == ("" if found else written[:end])
        assert [each for each, *_ in found] == ["weather", "now"][: len(found)]
