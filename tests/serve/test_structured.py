"""Structured output as clients ask for it: on a tiny model that would say anything at all."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import jsonschema
import openai
import pytest

from tests.runtime.random_logits import grammars
from tests.serve.conftest import Server, post
from tests.serve.test_api import CHAT, chat, streamed
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.runtime.grammar.matchers import Grammars
from tilewright.runtime.grammar.spec import REGEX, GrammarSpec
from tilewright.serve.output.reasoning import CLOSE
from tilewright.serve.prompt.structured import GrammarValidator, behind_reasoning
from tilewright.serve.web.errors import ApiError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_answers_validate_and_streams_join_to_them(client: openai.OpenAI) -> None:
    wanted = {"response_format": NAMED, "temperature": 1, "seed": 3, "n": 2}
    whole = chat(client, max_tokens=250, **wanted)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    texts, _ = streamed(client, max_tokens=250, **wanted)
    assert texts == [choice.message.content for choice in whole.choices]
    cut = chat(client, max_tokens=5, **wanted).choices
    assert {choice.finish_reason for choice in cut} == {"length"}
    for short, choice in zip(cut, whole.choices, strict=True):
        assert choice.message.content.startswith(short.message.content)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{4}-[a-c]+x"}, r"[0-9]{4}-[a-c]+x"),
        ({"choice": ["red", "green", "a blue"]}, r"red|green|a blue"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"enum": [7, None]}}, r"7|null"),
        ({"json": json.dumps({"const": "é"})}, r'"(é|\\u00[eE]9)"'),
    ],
)
def test_other_kinds_in_completions(server: Server, outputs: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "a", "max_tokens": 60, "structured_outputs": outputs, "ignore_eos": True}
    status, found = post(server, "/v1/completions", {**body, "temperature": 1, "logprobs": 2})
    assert status == 200, found
    choice = found["choices"][0]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"])
    else:
        assert "grammar" in outputs  # parentheses may go on for long
    assert len(choice["logprobs"]["tokens"]) <= found["usage"]["completion_tokens"]


def test_any_object(server: Server) -> None:
    body = {"messages": CHAT, "max_tokens": 120, "response_format": {"type": "json_object"}}
    _, found = post(server, "/v1/chat/completions", body)
    choice = found["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"if": {}}}}},
            "invalid_grammar",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value", ""),
        ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
        ({"structured_outputs": {"yaml": "a"}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "invalid_value", "structured_outputs.json"),
        ({"structured_outputs": {"json": '"a"'}}, "invalid_value", "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "invalid_grammar", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "a ::= b"}}, "invalid_grammar", ""),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "invalid_value",
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "invalid_grammar", ""),
    ],
)
def test_what_cannot_be_obeyed_is_400(
    server: Server, asked: dict[str, Any], code: str, param: str
) -> None:
    status, found = post(server, "/v1/chat/completions", {"messages": CHAT, **asked})
    assert status == 400, found
    assert found["error"]["code"] == code, found
    assert (found["error"]["param"] or "").startswith(param)
    assert "\n" not in found["error"]["message"]


def test_what_takes_too_long_is_400_and_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, plain = threading.Event(), Grammars.check

    def late(self: Grammars, spec: GrammarSpec) -> None:
        if spec.text == "late":
            gate.wait(60)
        plain(self, spec)

    monkeypatch.setattr(Grammars, "check", late)

    async def tried(trials: GrammarValidator, text: str) -> tuple[int, str] | None:
        try:
            await trials.check(GrammarSpec(kind=REGEX, text=text), "here")
        except ApiError as error:
            return error.status, error.code
        return None

    async def all_of_it() -> None:
        trials = GrammarValidator(grammars(), seconds=0.3)
        assert await tried(trials, "good") is None
        both = asyncio.gather(tried(trials, "late"), tried(trials, "good"))
        assert await both == [(400, "invalid_grammar"), None]
        assert await tried(trials, "late") == (400, "invalid_grammar")
        assert await tried(trials, "good") == (429, "overloaded"), "both threads are lost"
        gate.set()
        while trials._room.locked():
            await asyncio.sleep(0.01)
        assert await tried(trials, "good") is None, "they come back"
        trials.close()

    asyncio.run(all_of_it())


def test_a_grammar_of_a_chat_begins_behind_its_think_block() -> None:
    plain, spec = byte_tokenizer(256, "here"), GrammarSpec(kind=REGEX, text="a")

    class Thinks:
        chat_template = "... <think> ..."

        def encode(self, text: str) -> list[int]:
            return [77] if text == "<think>" else [1, 2]

    def placed(prompt: str, coder: Any) -> tuple[str, int | None]:
        found = behind_reasoning(spec, prompt, coder)
        return found.behind, found.opener

    assert placed("hello <think>\n", plain) == (CLOSE, None)
    assert placed("hello", plain) == ("", None)
    assert placed("hello", Thinks()) == (CLOSE, 77)
    assert placed("hello <think>\n\n</think>\n\n", Thinks()) == ("", None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_model_that_would_say_anything_calls_what_it_must(
    client: openai.OpenAI, choice: Any
) -> None:
    schema = {**SCHEMA, "properties": {"name": {"enum": ["é", "x"]}, "ok": {"type": "boolean"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    wanted = {"tools": tools, "tool_choice": choice, "temperature": 1, "seed": 3}
    found = chat(client, max_tokens=150, parallel_tool_calls=False, **wanted).choices[0]
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and found.message.content is None
    jsonschema.validate(json.loads(call.function.arguments), schema)
