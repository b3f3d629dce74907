"""The API as the openai client sees it, on a tiny model on the CPU."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.conftest import Server, post

CHAT: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **changes: Any) -> Any:
    asked = {"model": "any", "messages": CHAT, "max_tokens": 12, **changes}
    return client.chat.completions.create(**asked)


def streamed(client: openai.OpenAI, **changes: Any) -> tuple[list[str], list[Any]]:
    """The text of each choice, and the chunks."""
    chunks = list(chat(client, stream=True, **changes))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return [texts[index] for index in sorted(texts)], chunks


def test_a_chat_has_text_usage_and_a_reason(client: openai.OpenAI) -> None:
    found = chat(client, extra_body={"timings": True})
    assert isinstance(found.choices[0].message.content, str)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12
    assert found.timings["predicted_n"] == 12 and found.timings["prompt_ms"] > 0
    assert chat(client).choices[0].message.content == found.choices[0].message.content


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_stream_joined_is_the_text_unstreamed(client: openai.OpenAI, temperature: float) -> None:
    wanted = {"temperature": temperature, "seed": 7, "n": 3, "max_tokens": 20}
    whole = chat(client, **wanted)
    texts, chunks = streamed(client, stream_options={"include_usage": True}, **wanted)
    assert texts == [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == (1 if temperature == 0 else 3)
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for index in range(3):
        own = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert own[0].delta.role == "assistant" and own[0].delta.content
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [
            whole.choices[index].finish_reason
        ]


def test_a_stop_string_is_cut_off_wherever_tokens_end(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=40).choices[0].message.content
    for start in range(3, 12, 3):
        stop = text[start : start + 3]
        found = chat(client, max_tokens=40, stop=[stop, "never said"])
        assert found.choices[0].message.content == text[: text.index(stop)]
        assert found.choices[0].finish_reason == "stop"
        assert found.choices[0].stop_reason == stop
        assert found.usage.completion_tokens < 40
        assert streamed(client, max_tokens=40, stop=stop)[0] == [text[: text.index(stop)]]


def test_log_probabilities_are_of_the_tokens_said(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = found.logprobs.content
    assert len(content) == 12
    said = b"".join(bytes(each.bytes) for each in content).decode("utf-8", "replace")
    assert said == found.message.content
    for each in content:
        best = [top.logprob for top in each.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert each.logprob == best[0] <= 0  # greedy


def test_completions_take_texts_and_ids(client: openai.OpenAI, server: Server) -> None:
    prompt = "abc"
    ids = post(server, "/tokenize", {"prompt": prompt})[1]["tokens"]
    asked: dict[str, Any] = {"model": "any", "max_tokens": 6}
    both = client.completions.create(prompt=[prompt, "xyz"], n=2, logprobs=2, **asked)
    assert len(both.choices) == 4 and both.choices[0].text == both.choices[1].text
    assert both.usage is not None and both.usage.completion_tokens == 24
    by_ids = client.completions.create(prompt=ids, **asked)
    assert by_ids.choices[0].text == both.choices[0].text
    scores = both.choices[0].logprobs
    assert scores is not None and len(scores.tokens or ()) == 6
    assert all(len(top) == 2 for top in scores.top_logprobs or ())
    echoed = client.completions.create(prompt=prompt, echo=True, **asked)
    assert echoed.choices[0].text == prompt + by_ids.choices[0].text


def test_the_seed_is_said_and_repeats(client: openai.OpenAI) -> None:
    first = chat(client, temperature=1.5, max_tokens=16, extra_body={"timings": True})
    again = chat(client, temperature=1.5, max_tokens=16, seed=first.timings["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_top_p_zero_is_the_most_likely_token(client: openai.OpenAI) -> None:
    greedy = chat(client, temperature=0).choices[0].message.content
    assert chat(client, temperature=2, top_p=0, seed=5).choices[0].message.content == greedy


def test_top_n_sigma_of_a_narrow_range_is_greedy(client: openai.OpenAI) -> None:
    greedy = chat(client, temperature=0).choices[0].message.content
    assert chat(client, temperature=50, seed=5).choices[0].message.content != greedy
    for width, is_greedy in ((1e-6, True), (-1, False)):
        narrow = chat(client, temperature=50, seed=5, extra_body={"top_n_sigma": width})
        assert (narrow.choices[0].message.content == greedy) == is_greedy


def test_a_missing_limit_is_the_context_left(client: openai.OpenAI, server: Server) -> None:
    most = server.get("/props")["max_model_len"]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 80}]}
    asked["extra_body"] = {"ignore_eos": True}
    found = chat(client, max_tokens=openai.NOT_GIVEN, **asked).usage
    assert found.prompt_tokens > 300
    assert found.prompt_tokens + found.completion_tokens == most + 1
    again = chat(client, max_tokens=10_000, **asked).usage
    assert again.completion_tokens == found.completion_tokens


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 17}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 1 << 63}, "seed"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, None),
        ({"functions": []}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_bad_values_are_400_with_their_place(
    client: openai.OpenAI, changes: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, max_tokens=changes.pop("max_tokens", 4), extra_body=changes)
    assert caught.value.param == param
    assert caught.value.message and caught.value.code


def test_what_is_not_known_is_accepted_and_named(server: Server, client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "s", "type": "text"}, {**CHAT[0], "type": "text"}]
    raw = client.chat.completions.with_raw_response.create(
        model="x", messages=messages, max_tokens=1, extra_body={"zig": 1, "user": "u"}
    )
    assert raw.headers["x-ignored-fields"] == "zig"
    assert raw.parse().usage is not None


def test_models_health_and_the_page(server: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert server.get("/health") == {"status": "ok"}
    status, page, headers = server.ask("GET", "/")
    assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
    sizes = [len(page), *(len(server.ask("GET", f"/page.{kind}")[1]) for kind in ("js", "css"))]
    assert 0 < sum(sizes) < 100_000 and all(sizes)
    assert b"innerHTML" not in server.ask("GET", "/page.js")[1]


def test_text_to_tokens_and_back(server: Server) -> None:
    tokens = post(server, "/tokenize", {"content": "wörld"})[1]["tokens"]
    assert post(server, "/detokenize", {"tokens": tokens})[1]["content"] == "wörld"
    text = post(server, "/apply-template", {"messages": CHAT})[1]["prompt"]
    asked = {"messages": CHAT, "return_token_strs": True}
    found = post(server, "/tokenize", asked)[1]
    assert found["count"] == len(found["tokens"]) and "".join(found["token_strs"]) == text


def test_metrics_count_what_was_served(server: Server, client: openai.OpenAI) -> None:
    before = server.gauge("generation_tokens_total")
    chat(client, max_tokens=5)
    assert server.gauge("generation_tokens_total") == before + 5
    assert server.gauge("time_to_first_token_seconds_count") > 0
