"""The Responses API: the openai client, a server, and an engine that says a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.serve.fronts import Running, running_front
from tests.serve.scripted import Scripted, scripted
from tests.serve.test_tools import CALLS, HERMES, client_of
from tilewright.serve.responses.store import ResponseStore
from tilewright.serve.web.settings import ServerConfig

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("weather", "now")
]


@pytest.fixture(scope="module")
def hermes() -> Iterator[Scripted]:
    with scripted(HERMES, default_chat_template_kwargs={"enable_thinking": False}) as found:
        yield found


@pytest.fixture(scope="module")
def thinker() -> Iterator[Scripted]:
    with scripted(HERMES) as found:
        yield found


def ask(server: Scripted, value: Any, **changes: Any) -> Any:
    return client_of(server).responses.create(model="any", input=value, **changes)


def stream(server: Scripted, value: Any, **changes: Any) -> list[Any]:
    return list(ask(server, value, stream=True, **changes))


def test_a_text_is_a_message_with_usage(hermes: Scripted) -> None:
    found = ask(hermes, "SAY(hello é)YAS", instructions="be brief", metadata={"a": "b"})
    assert (found.object, found.status, found.error) == ("response", "completed", None)
    assert found.output_text == "hello é" and found.id.startswith("resp_")
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert found.metadata == {"a": "b"} and found.instructions == "be brief"
    usage = found.usage
    assert usage.input_tokens > 0 and usage.output_tokens == len("hello é".encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert hermes.prompt.startswith("<system>be brief|<user>SAY(hello")


def test_a_stream_s_events_are_those_of_the_answer(hermes: Scripted) -> None:
    events = stream(hermes, "SAY(one two)YAS")
    kinds = [each.type.removeprefix("response.") for each in events]
    assert [each.sequence_number for each in events] == [*range(len(events))]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == ends and set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [each.delta for each in events if each.type.endswith("text.delta")]
    assert "".join(deltas) == events[-4].text == events[-1].response.output_text == "one two"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    with client_of(hermes).responses.stream(model="any", input="SAY(ab)YAS") as helper:
        assert helper.get_final_response().output_text == "ab"


def test_calls_are_items_and_their_outputs_go_back(hermes: Scripted) -> None:
    whole = ask(hermes, f"SAY({CALLS})YAS", tools=TOOLS)
    events = stream(hermes, f"SAY({CALLS})YAS", tools=TOOLS)
    for found in (whole, events[-1].response):
        kinds = [item.type for item in found.output]
        assert kinds == ["message", "function_call", "function_call"]
        calls = [(each.name, json.loads(each.arguments)) for each in found.output[1:]]
        assert calls == [("weather", {"city": "Paris é"}), ("now", {})]
        assert found.output_text.strip() == "Looking." and found.status == "completed"
    told = [each for each in events if each.type == "response.function_call_arguments.delta"]
    dones = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert "".join(e.delta for e in told if e.output_index == 1) == dones[0].arguments
    assert [each.name for each in dones] == ["weather", "now"]
    output = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "sun"}
    items = [{"role": "user", "content": "x"}, *whole.output, output]
    assert ask(hermes, items, tools=TOOLS).status == "completed"
    prompt = hermes.prompt
    assert "<user>x|<assistant>Looking." in prompt and "weather:" in prompt and "now:" in prompt
    assert "<tool>sun|" in prompt and prompt.count("<assistant>") == 2


def test_tool_choice_names_a_function_and_only_functions_are_tools(hermes: Scripted) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    choice: Any = {"type": "function", "name": "now"}
    found = ask(hermes, f"SAY({call})YAS", tools=TOOLS, tool_choice=choice)
    assert [each.name for each in found.output] == ["now"] and found.tool_choice.name == "now"
    assert hermes.client.asked[-1].grammar is not None
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[1\].type: 'web_search'; allowed: fun"
    ):
        ask(hermes, "x", tools=[TOOLS[0], {"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(hermes, "x", tools=TOOLS, tool_choice={"type": "function", "name": "other"})


def test_reasoning_is_an_item_of_its_own_and_is_replayed(thinker: Scripted) -> None:
    said = "SAY(why not</think>so)YAS"
    whole, events = ask(thinker, said), stream(thinker, said)
    for found in (whole, events[-1].response):
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert found.output[0].content[0].text == "why not" and found.output_text == "so"
        assert found.usage.output_tokens_details.reasoning_tokens > 0
    deltas = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "why not"
    ask(
        thinker, [{"role": "user", "content": "x"}, *whole.output, {"role": "user", "content": "y"}]
    )
    assert "<user>x|<assistant>(why not)so|<user>y|" in thinker.prompt
    ask(thinker, "x", reasoning={"effort": "none"})
    assert thinker.prompt.endswith("<think>\n\n</think>\n\n")


def test_stored_responses_are_continued_listed_and_deleted(hermes: Scripted) -> None:
    client = client_of(hermes)
    first = ask(hermes, "SAY(blue)YAS", instructions="sys")
    second = ask(hermes, "SAY(red)YAS", previous_response_id=first.id)
    third = stream(hermes, "more", previous_response_id=second.id)[-1].response
    expected = "<user>SAY(blue)YAS|<assistant>blue|<user>SAY(red)YAS|<assistant>red|<user>more|"
    assert expected in hermes.prompt and "sys" not in hermes.prompt
    assert third.previous_response_id == second.id
    assert client.responses.retrieve(second.id).output_text == "red"
    items = client.responses.input_items.list(third.id, order="asc", limit=2)
    assert [item.type for item in items.data] == ["message"] * 2 and items.has_more
    assert len(list(client.responses.input_items.list(third.id, limit=2))) == 5
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match=r"previous_response_id: .* is not stored"):
        ask(hermes, "x", previous_response_id=second.id)
    assert ask(hermes, "SAY(a)YAS", previous_response_id=third.id).output_text == "a"
    unkept = ask(hermes, "SAY(a)YAS", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_input_tokens_are_those_of_the_response(hermes: Scripted) -> None:
    num_asked, counter = len(hermes.client.asked), client_of(hermes).responses.input_tokens
    first = ask(hermes, "SAY(blue)YAS")
    body: dict[str, Any] = {"input": "and?", "instructions": "be brief", "tools": TOOLS}
    body["previous_response_id"] = first.id
    counted = counter.count(model="any", **body)
    assert counted.object == "response.input_tokens"
    assert len(hermes.client.asked) == num_asked + 1, "the engine has no request of it"
    whole = client_of(hermes).responses.create(model="any", **body)
    assert counted.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="'zig' is not stored"):
        counter.count(model="any", input="x", previous_response_id="zig")


def test_a_cut_answer_is_incomplete(hermes: Scripted) -> None:
    whole = ask(hermes, "SAY(abcdef)YAS", max_output_tokens=3)
    events = stream(hermes, "SAY(abcdef)YAS", max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    for found in (whole, events[-1].response):
        assert (found.status, found.output_text) == ("incomplete", "abc")
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.output[0].status == "incomplete"


def test_a_schema_holds_the_text(hermes: Scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    found = ask(hermes, 'SAY({"a":1})YAS', text=text)
    assert json.loads(found.output_text) == {"a": 1} and hermes.client.asked[-1].grammar is not None
    assert found.text.format.schema_ == schema
    with pytest.raises(openai.BadRequestError) as refused:
        ask(hermes, "x", text={"format": {"type": "json_schema", "name": "n", "schema": 3}})
    assert refused.value.param.startswith("text.format")


PART = {"type": "input_file", "file_url": "x"}
IMAGE = {"type": "input_image", "image_url": "x"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": [{"type": "zig"}]}, "input[0].type: 'zig'; allowed: message, function_call,"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: 'item_reference'"),
        ({"input": [{"zig": 1}]}, "input[0].type: 'None'; allowed"),
        ({"input": []}, "input: empty; allowed"),
        ({}, "input: empty; allowed"),
        ({"input": [{"role": "user", "content": [PART]}]}, "input[0].content[0]: a part of type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "this model and target take no images"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role: Invalid enum"),
        ({"input": [{"role": "user"}]}, "input[0]: Object missing required field `content`"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]: Object missing"),
        ({"input": 3}, "input: Expected"),
        ({"input": "x", "background": True}, "background: answers are not made"),
        ({"input": "x", "conversation": "c"}, "conversation: allowed: previous_response_id"),
        ({"input": "x", "truncation": "auto"}, "truncation: auto; allowed: disabled"),
        ({"input": "x", "include": ["zig"]}, "include[0]: 'zig'; allowed"),
        ({"input": "x", "tools": [{"type": "function", "name": 3}]}, "tools[0].name: Expected"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0]: Object missing required"),
        ({"input": "x", "previous_response_id": "zig"}, "'zig' is not stored"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens: Expected"),
        ({"input": "x" * 5000}, "the prompt has"),
    ],
)
def test_bad_requests_are_refused_in_one_line(hermes: Scripted, body: Any, said: str) -> None:
    answer = httpx2.post(f"{hermes.url}/v1/responses", json={"model": "any", **body})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said in message and "\n" not in message


def test_log_probabilities_failures_and_keys() -> None:
    """On an engine process of its own: what the fake one scores, fails and serves."""
    with running_front(ServerConfig(api_key=("one", "two"))) as front:
        one, two = (
            openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)
            for key in ("one", "two")
        )
        asked: Any = {"model": "any", "input": "x", "max_output_tokens": 3}
        scored = one.responses.create(**asked, include=["message.output_text.logprobs"])
        found = scored.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert found and [each.token for each in found] == ["a", "b", "c"]
        assert one.responses.create(**asked, top_logprobs=2).output_text == "abc"
        with pytest.raises(openai.NotFoundError):
            two.responses.retrieve(scored.id)
        assert one.responses.retrieve(scored.id).output_text == "abc"
        with pytest.raises(openai.InternalServerError):
            one.responses.create(model="any", input="N")
        check_it_dies_in_a_stream(front, one)


def check_it_dies_in_a_stream(front: Running, client: openai.OpenAI) -> None:
    """A stream that has begun ends with an event that says so."""
    slow = client.responses.create(model="any", input="S", max_output_tokens=4000, stream=True)
    kinds = []
    for event in slow:
        if not kinds:
            front.loop.call_soon_threadsafe(front.front.client.fail_all, "engine_error", "gone")
        kinds.append(event.type)
    assert kinds[0] == "response.created" and kinds[-1] == "response.failed"
    assert event.response.error.message == "gone"  # type: ignore[union-attr]


def test_the_store_drops_the_oldest_first() -> None:
    store = ResponseStore(most=3, most_bytes=1000)
    for at in range(4):
        store.add("", {"id": str(at), "output": []}, [], [])
    assert [store.find("", str(at)) is not None for at in range(4)] == [False, True, True, True]
    store.find("", "1")
    store.add("", {"id": "4", "output": []}, [], [])
    assert store.find("", "1") and not store.find("", "2") and not store.find("x", "1")
    store.add("", {"id": "5", "output": ["x" * 2000]}, [], [])
    assert len(store) == 0
    assert not store.remove("", "1")


def test_store_counts_the_items_that_later_responses_hold() -> None:
    store = ResponseStore(most_bytes=3500)
    for name in "abcdef":
        store.add("", {"id": name, "output": []}, [{"text": name * 1000}], [])
        first = store.find("", name)
        assert first is not None
        for turn in "01":
            store.add("", {"id": name + turn, "output": []}, [{}], first.conversation)
        store.remove("", name)
    found = [store.find("", name + turn) for name in "abcdef" for turn in "01"]
    assert [each is not None for each in found] == 6 * [False] + 6 * [True]
    for name in "def":
        assert store.remove("", name + "0") and store.remove("", name + "1")
    store.add("", {"id": "g", "output": []}, [{"text": "x" * 3300}], [])
    assert store.find("", "g"), "what is gone is not counted"
