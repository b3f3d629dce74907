"""Bodies and bytes that nobody would send: answered as the table of errors says, or closed, and the
next good request is right. A few in each run, 100,000 of each by hand.
"""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.serve.fronts import Running, is_idle, num_descriptors, running_front, wait_until
from tilewright.serve.web.settings import ServerConfig

SIZES = [300, pytest.param(20_000, marks=pytest.mark.slow)]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "max_tokens": 2,
        "stop": ["q", "zz"],
        "logit_bias": {"3": 1.5},
        "temperature": 0.5,
        "seed": 1,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 1, "echo": True},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "y"},
        ],
        "instructions": "z",
        "max_output_tokens": 2,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "low"},
        "store": True,
        "stream": True,
    },
    "/v1/embeddings": {"input": [[1, 2], [3]], "dimensions": 2, "pooling": "last"},
    "/tokenize": {"content": "some text", "with_pieces": True},
    "/detokenize": {"tokens": [65, 66]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
}
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, -(1 << 64), 10**400, 1e308, -0.0, 0.5),
    *("", "x", "\x00", "\U0010ffff", "x" * 5000, "{{ x }}", "<think>", [], {}, [[]], [None], [{}]),
    *({"type": "x"}, {"role": "user"}, [1, "x"], {"x": {"x": {}}}, [0] * 2000, ["x"] * 100),
)
WORDS = (b"null", b"NaN", b"1e999", b"-", b"[[[[", b'"\\ud800"', b"\xff", b"\x00", b"{", b"}", b",")
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MEANT = {100, 200, 400, 404, 405, 408, 413, 415}


def changed(value: Any, chooser: random.Random) -> Any:
    """A JSON value with one place in it changed."""
    if isinstance(value, dict) and value and chooser.random() < 0.85:
        key = chooser.choice(list(value))
        kind = chooser.random()
        if kind < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if kind < 0.2:
            return {**value, chooser.choice(("zig", "model", "top_k", "\x00")): pick(chooser)}
        return {**value, key: changed(value[key], chooser)}
    if isinstance(value, list) and value and chooser.random() < 0.7:
        at = chooser.randrange(len(value))
        return [*value[:at], changed(value[at], chooser), *value[at + 1 :]]
    return pick(chooser)


def pick(chooser: random.Random) -> Any:
    return chooser.choice(STRANGE)


def body(chooser: random.Random, path: str) -> bytes:
    found: Any = GOOD[path]
    for _ in range(chooser.randint(1, 3)):
        found = changed(found, chooser)
    data = bytearray(json.dumps(found).encode())
    if chooser.random() < 0.3 and data:
        at = chooser.randrange(len(data))
        data[at : at + chooser.randint(0, 4)] = chooser.choice(WORDS)
    return bytes(data)


def check_it_serves(running: Running) -> None:
    asked = {"prompt": "next", "max_tokens": 3}
    status, answer, _ = running.post("/v1/completions", asked)
    assert status == 200 and answer["choices"][0]["text"] == "abc", answer
    assert running.front.client.num_restarts == 0


@pytest.mark.parametrize("count", SIZES)
def test_no_body_breaks_it(count: int) -> None:
    chooser, seen = random.Random(count), Counter[int]()
    with running_front() as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=600)
        for at in range(count):
            path = chooser.choice(tuple(GOOD))
            data = body(chooser, path)
            connection.request("POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            seen[answer.status] += 1
            assert answer.status in (200, 400), (path, data, said)
            if answer.status == 400:
                assert json.loads(said)["error"]["message"], data
            elif said[:6] not in (b"data: ", b"event:"):
                json.loads(said)
            if at % 1000 == 999:
                check_it_serves(running)
        connection.close()
        wait_until(lambda: is_idle(running))
        check_it_serves(running)
        assert seen[200] > count // 50 and seen[400] > count // 10, seen


def stream(chooser: random.Random) -> bytes:
    """Bytes for a connection: a request with parts of it gone, doubled, changed or of nonsense."""
    data = bytearray()
    for _ in range(chooser.randint(1, 3)):
        path = chooser.choice((*GOOD, "/health", "/metrics", "/", "/%00", "//", "*"))
        method = chooser.choice(("GET", "POST", "POST", "PUT", "OPTIONS", "get", "\x00"))
        content = b'{"prompt": "x", "max_tokens": 1}'
        lines = [f"{method} {path} HTTP/1.{chooser.choice('110')}", "host: localhost"]
        lines.append(
            chooser.choice(
                (f"content-length: {len(content)}",) * 3
                + (
                    "content-length: x",
                    "transfer-encoding: chunked",
                    "content-length: 99999999999",
                    "connection: close",
                    "expect: 100-continue",
                    "upgrade: websocket",
                    "x" * 300,
                )
            )
        )
        data += "\r\n".join(lines).encode() + b"\r\n\r\n" + content
    for _ in range(chooser.choice((0, 0, 1, 4))):
        at = chooser.randrange(len(data))
        data[at : at + chooser.randint(0, 8)] = chooser.randbytes(chooser.randint(0, 8))
    return bytes(data[: chooser.choice((len(data), chooser.randrange(1, len(data) + 1)))])


@pytest.mark.parametrize("count", SIZES)
def test_no_bytes_break_it(count: int) -> None:
    chooser, seen = random.Random(count), Counter[int]()
    with running_front(ServerConfig(header_timeout=2.0, body_timeout=0.5)) as running:
        known = num_descriptors()
        for at in range(count):
            with running.connect() as client:
                is_good = at % 100 == 0
                client.sendall(HEALTH if is_good else stream(chooser))
                if at % 4 == 0:
                    client.settimeout(5.0 if is_good else 0.02)
                    try:
                        answer = client.recv(1 << 16)
                    except OSError:
                        continue
                    if answer:
                        status = int(answer[9:12])
                        seen[status] += 1
                        assert status in MEANT, answer
            if at % 1000 == 999:
                check_it_serves(running)
        wait_until(lambda: is_idle(running) and num_descriptors() <= known)
        check_it_serves(running)
        assert seen[200] and seen[400], seen
