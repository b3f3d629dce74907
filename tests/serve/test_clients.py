"""What clients see of answers: golden streams, curl, and the openai client in all its forms."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.fronts import Running, running_front, wait_until
from tests.serve.test_api_server import chat, is_idle

CHUNK = '{"id":"ID","object":"%s","created":0,"model":"fake","system_fingerprint":"FP","choices":'
ONE = CHUNK % "chat.completion.chunk"
TEXT = CHUNK % "text_completion"
NOTHING = '"logprobs":null,"finish_reason":null}],"usage":null}'
LAST = '"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}'
USAGE = (
    '[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,'
    '"prompt_tokens_details":{"cached_tokens":0},'
    '"completion_tokens_details":{"reasoning_tokens":0}}}'
)
GOLDEN = {
    "/v1/chat/completions": (
        f'data: {ONE}[{{"index":0,"delta":{{"role":"assistant","content":"abc"}},{NOTHING}\n\n'
        f'data: {ONE}[{{"index":0,"delta":{{}},{LAST}\n\ndata: {ONE}{USAGE}\n\ndata: [DONE]\n\n'
    ),
    "/v1/completions": (
        f'data: {TEXT}[{{"index":0,"text":"abc",{NOTHING}\n\n'
        f'data: {TEXT}[{{"index":0,"text":"",{LAST}\n\ndata: {TEXT}{USAGE}\n\ndata: [DONE]\n\n'
    ),
}
COMMANDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("x", max_tokens=3),
    "/v1/completions": {"prompt": "x\n", "max_tokens": 3},
}


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    with running_front() as running:
        yield running


def plain(text: str) -> str:
    """Without what differs each time."""
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"', '"id":"ID"', text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    return re.sub(r'"system_fingerprint":"fp_[0-9a-f]{16}"', '"system_fingerprint":"FP"', text)


@pytest.mark.parametrize("path", GOLDEN)
def test_a_stream_is_these_bytes(front: Running, path: str) -> None:
    body = {**COMMANDS[path], "stream": True, "stream_options": {"include_usage": True}}
    status, data, headers = front.ask("POST", path, json.dumps(body).encode())
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert plain(data.decode()) == GOLDEN[path]


def test_a_whole_answer_is_these_bytes(front: Running) -> None:
    body = COMMANDS["/v1/chat/completions"]
    _, data, headers = front.ask("POST", "/v1/chat/completions", json.dumps(body).encode())
    message = '{"role":"assistant","content":"abc"}'
    rest = f'"logprobs":null,"finish_reason":"length","stop_reason":null}}],{USAGE[3:]}'
    whole = f'{CHUNK % "chat.completion"}[{{"index":0,"message":{message},{rest}'
    assert plain(data.decode()) == whole and int(headers["content-length"]) == len(data)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams(front: Running) -> None:
    path = "/v1/completions"
    body = {**COMMANDS[path], "stream": True, "stream_options": {"include_usage": True}}
    command = ["curl", "-sN", f"{front.url}{path}", "-H", "content-type: application/json"]
    found = subprocess.run(
        [*command, "-d", json.dumps(body)], capture_output=True, check=True, timeout=60
    )
    assert plain(found.stdout.decode()) == GOLDEN[path]


def test_the_client_has_headers_and_errors(front: Running) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "any", **chat("x")}
    raw = client.chat.completions.with_raw_response.create(**body)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == "abcd"
    with client.chat.completions.with_streaming_response.create(**body) as answer:
        assert json.loads(answer.read())["object"] == "chat.completion"
    with pytest.raises(openai.InternalServerError) as fault:
        client.chat.completions.create(model="any", **chat("N"))
    assert fault.value.code == "not_a_number" and fault.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model="any", prompt="x")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model="any", **chat("W"))
    wait_until(lambda: is_idle(front), seconds=5)


def test_the_asynchronous_client_streams_and_cancels(front: Running) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            body: dict[str, Any] = {"model": "any", **chat("x")}
            found = await asyncio.gather(
                *(client.chat.completions.create(**body) for _ in range(20))
            )
            assert {each.choices[0].message.content for each in found} == {"abcd"}
            slow: dict[str, Any] = {"model": "any", **chat("S", max_tokens=4000), "n": 3}
            stream = await client.chat.completions.create(**slow, stream=True)
            async for _ in stream:
                break
            await stream.close()
            asking = asyncio.ensure_future(client.chat.completions.create(**slow))
            while front.front.client.num_live < 3:
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(ask())
    wait_until(lambda: is_idle(front), seconds=5)
