"""Tools and reasoning end to end: the openai client, a server, and an engine that says a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.scripted import Scripted, scripted

HERMES = (
    "{% if tools %}[<tool_call>]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is not defined or "
    "enable_thinking %}<think>{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "now")
]
CALLS = (
    'Looking.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris é"}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)


@pytest.fixture(scope="module")
def hermes() -> Iterator[Scripted]:
    with scripted(HERMES, default_chat_template_kwargs={"enable_thinking": False}) as found:
        yield found


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def client_of(server: Scripted) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Scripted, text: str, **changes: Any) -> Any:
    asked = {"model": "any", "messages": say(text), "tools": TOOLS, **changes}
    return client_of(server).chat.completions.create(**asked)


def called(message: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in message.tool_calls or []]


def test_calls_are_named_and_end_the_answer(hermes: Scripted) -> None:
    choice = chat(hermes, CALLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Looking."
    assert called(choice.message) == [("weather", '{"city": "Paris é"}'), ("now", "{}")]
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2 and all(each.startswith("call_") for each in ids)
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert json.dumps(TOOLS[0]["function"]["parameters"]) in hermes.prompt
    alone = chat(hermes, CALLS.removeprefix("Looking.\n")).choices[0]
    assert alone.message.content is None and len(alone.message.tool_calls) == 2


def test_a_stream_of_calls_joined_is_the_answer_unstreamed(hermes: Scripted) -> None:
    chunks = list(chat(hermes, CALLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    for index, whole in enumerate(called(chat(hermes, CALLS).choices[0].message)):
        own = [piece for piece in pieces if piece.index == index]
        assert own[0].id and own[0].type == "function" and own[0].function.name == whole[0]
        assert all(piece.id is None and piece.function.name is None for piece in own[1:])
        assert "".join(piece.function.arguments for piece in own) == whole[1]
    assert "".join(delta.content or "" for delta in deltas) == "Looking."
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    with client_of(hermes).chat.completions.stream(
        model="any", messages=say(CALLS), tools=TOOLS
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert called(message) == called(chat(hermes, CALLS).choices[0].message)


def test_a_call_that_is_cut_short_is_given_as_far_as_it_came(hermes: Scripted) -> None:
    most = len(CALLS[: CALLS.index("ris")].encode())
    choice = chat(hermes, CALLS, max_tokens=most).choices[0]
    assert choice.finish_reason == "length"
    assert called(choice.message) == [("weather", '{"city": "Pa')]
    stopped = chat(hermes, CALLS, stop="Par").choices[0]
    assert stopped.finish_reason == "stop" and called(stopped.message) == [
        ("weather", '{"city": "')
    ]


def test_cut_answer_that_must_call_has_no_content(hermes: Scripted) -> None:
    """The closing tag, and a second call, cut at each of their characters."""
    twice = CALLS.removeprefix("Looking.\n")
    for most in range(1, len(twice.encode()) + 1, 3):
        choice = chat(hermes, twice, max_tokens=most, tool_choice="required").choices[0]
        assert not choice.message.content, most
        names = [name for name, _ in called(choice.message)]
        assert names == ["weather", "now"][: len(names)]
    chunks = chat(hermes, twice, max_tokens=80, tool_choice="required", stream=True)
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_answer_that_must_call_ends_where_other_text_follows(hermes: Scripted) -> None:
    """A model that has called and would go on is not forced to call again."""
    calls = CALLS.removeprefix("Looking.\n")
    for streams in (False, True):
        asked = {"tool_choice": "required", "max_tokens": 400, "stream": streams}
        found = chat(hermes, f"{calls}\nThe weather is {calls}", **asked)
        spec = hermes.client.asked[-1].grammar
        assert spec is not None and "TEXT" in spec.text
        if not streams:
            (choice,) = found.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert [name for name, _ in called(choice.message)] == ["weather", "now"]
            assert found.usage.completion_tokens < len(calls.encode()) + 8
            continue
        choices = [chunk.choices[0] for chunk in found]
        assert choices[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in choices)
        assert max(c.index for choice in choices for c in choice.delta.tool_calls or []) == 1


def test_text_is_no_call_and_no_tools_are_no_calls(hermes: Scripted) -> None:
    text = "a <tool_call> is { and <tool_call>[ "
    choice = chat(hermes, text).choices[0]
    assert choice.message.content == text and choice.finish_reason == "stop"
    for changes in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}, {"tools": []}):
        choice = chat(hermes, CALLS, **changes).choices[0]
        assert choice.message.content == CALLS and not choice.message.tool_calls
        assert "weather" not in hermes.prompt.partition("SAY")[0]


def test_one_call_is_enough_where_they_are_not_parallel(hermes: Scripted) -> None:
    found = chat(hermes, CALLS, parallel_tool_calls=False)
    choice = found.choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    assert found.usage.completion_tokens < len(CALLS.encode()) - 30


def test_earlier_calls_and_results_go_through_the_template(hermes: Scripted) -> None:
    first = chat(hermes, CALLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "7"} for c in first.tool_calls]
    answer = {**first.model_dump(exclude_none=True), "reasoning": "hm"}
    chat(hermes, "", messages=[*say(CALLS), answer, *results, *say("Fine.")])
    written = '<assistant>(hm)Looking.weather:{"city": "Paris é"}now:{}|<tool>7|<tool>7|'
    assert written in hermes.prompt


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [deep(200)]}, "tools[0].function.parameters"),
    ],
)
def test_tools_that_cannot_be(hermes: Scripted, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(hermes, "", extra_body=changes)
    assert caught.value.param == param


def test_reasoning_is_where_the_prompt_has_opened_it(hermes: Scripted) -> None:
    text = 'Hm <tool_call>{"name": "now"}</tool_call>\n</think>\n\n' + CALLS
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    found = chat(hermes, text, extra_body=thinking)
    message = found.choices[0].message
    assert message.reasoning_content == message.reasoning == text.partition("\n</think>")[0]
    assert message.content == "Looking." and len(message.tool_calls) == 2
    details = found.usage.completion_tokens_details
    assert details.reasoning_tokens == len(text.partition("</think>")[0]) + len("</think>") - 1
    for effort in ({"reasoning_effort": "none"}, {}):
        message = chat(hermes, "So.", **effort).choices[0].message
        assert message.content == "So." and not hasattr(message, "reasoning_content")
        assert hermes.prompt.endswith("</think>\n\n")
    off = chat(hermes, "So.", reasoning_effort="none", extra_body=thinking).choices[0].message
    assert off.content == "So."


def test_a_template_without_tools_has_a_generic_format() -> None:
    """Tools, calls and results are written into the messages, and hermes is read of the answer."""
    with scripted(PLAIN) as server:
        first = chat(server, CALLS).choices[0].message
        assert called(first) == [("weather", '{"city": "Paris é"}'), ("now", "{}")]
        assert server.prompt.startswith("<system>You may call") and '"weather"' in server.prompt
        results = [{"role": "tool", "tool_call_id": c.id, "content": "7"} for c in first.tool_calls]
        history = [*say(CALLS), first.model_dump(exclude_none=True), *results]
        for tools in (TOOLS, openai.NOT_GIVEN):
            chat(server, "", messages=history, tools=tools)
            assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>|' in server.prompt
        must = chat(server, CALLS, tool_choice="required").choices[0].message
        assert called(must) == called(first) and server.client.asked[-1].grammar is not None
        found = props(server)
        assert (found["tool_format"], found["tool_format_from"]) == ("hermes", "generic")


def test_a_template_whose_calls_are_not_known_has_a_generic_format() -> None:
    """Tools are told once: by the instruction, not by the template as well."""
    with scripted(f"{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{PLAIN}") as server:
        assert len(chat(server, CALLS).choices[0].message.tool_calls) == 2
        assert server.prompt.startswith("<system>You may call")
        assert server.prompt.partition("SAY")[0].count('"weather"') == 1
        found = props(server)
        assert found["chat_template_reads"]["tools"] and found["tool_format_from"] == "generic"


@pytest.mark.parametrize(
    "body",
    [
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
        "{% if m.role != 'system' %}",
    ],
    ids=["refuses", "leaves out"],
)
def test_tools_go_to_the_user_where_there_is_no_system(body: str) -> None:
    end = "{% endif %}" if body.startswith("{% if m.role !=") else ""
    said = "<{{ m.role }}>{{ m.content }}|"
    template = f"{{% for m in messages %}}{body}{said}{end}{{% endfor %}}"
    with scripted(template) as server:
        assert len(chat(server, CALLS).choices[0].message.tool_calls) == 2
        assert server.prompt.startswith("<user>You may call") and server.prompt.count("<user>") == 1
        system = [{"role": "system", "content": "Be brief."}, *say("")]
        with pytest.raises(openai.BadRequestError, match=r"system"):
            chat(server, "", messages=system)


def test_a_template_without_tools_takes_a_format_that_is_named() -> None:
    with scripted(PLAIN, tool_format="mistral") as server:
        text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]'
        first = chat(server, text).choices[0].message
        (call,) = first.tool_calls
        assert len(call.id) == 9 and called(first) == [("weather", '{"city": "Paris"}')]
        assert server.prompt.startswith("<system>You may call") and '"weather"' in server.prompt
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        chat(server, "", messages=[*say(text), first.model_dump(exclude_none=True), result])
        assert f"<assistant>{text}|<user><tool_response>\n7\n</tool_response>|" in server.prompt
        found = props(server)
        assert (found["tool_format"], found["tool_format_from"]) == ("mistral", "option")


def props(server: Scripted) -> Any:
    with openai.DefaultHttpxClient() as web:
        return web.get(f"{server.url}/props").json()


def test_what_a_template_reads_is_said(hermes: Scripted) -> None:
    found = props(hermes)
    assert (found["tool_format"], found["tool_format_from"]) == ("hermes", "template")
    assert found["chat_template_reads"] == {
        "tools": True,
        "tool_calls": True,
        "variables": ["enable_thinking"],
    }


def test_a_call_that_must_be_is_a_grammar_and_free_text_is_up_to_the_marker(
    hermes: Scripted,
) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for choice, behind in (("required", ""), (named, ""), ("auto", "<tool_call>")):
        assert chat(hermes, CALLS, tool_choice=choice).choices[0].message.tool_calls
        spec = hermes.client.asked[-1].grammar
        assert spec is not None and spec.behind == behind
        assert ("weather" in spec.text) == (choice != named)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    chat(hermes, CALLS, tool_choice="required", extra_body=thinking)
    spec = hermes.client.asked[-1].grammar
    assert spec is not None and spec.behind == "</think>"
    chat(hermes, CALLS, tool_choice="none")
    assert hermes.client.asked[-1].grammar is None


def test_schemas_that_cannot_be_enforced(hermes: Scripted) -> None:
    """One that must be is refused; else the answer says that it is not held to it."""
    bad = {"type": "object", "properties": {"city": {"type": "string", "pattern": "("}}}
    function = {"name": "weather", "parameters": bad}
    asked: dict[str, Any] = {"model": "any", "messages": say(CALLS)}
    create = client_of(hermes).chat.completions.with_raw_response.create
    tools: list[Any] = [{"type": "function", "function": function}]
    raw = create(tools=tools, **asked)
    assert raw.headers["x-unconstrained-tools"] and raw.parse().choices[0].message.tool_calls
    strict: list[Any] = [{"type": "function", "function": {**function, "strict": True}}]
    for changes in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**changes, **asked)
        assert caught.value.code == "invalid_grammar" and caught.value.param == "tools"


def test_a_template_that_costs_too_much_is_400() -> None:
    template = "{% for m in messages %}{{ m.content * 10 ** 7 }}{% endfor %}"
    with scripted(template) as server:
        with pytest.raises(openai.BadRequestError, match="characters") as caught:
            chat(server, "x", tools=openai.NOT_GIVEN)
        assert caught.value.code == "template_error"
