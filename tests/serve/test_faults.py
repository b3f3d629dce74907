"""Clients that misbehave and processes that die; each with real processes on loopback."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from typing import Any

import pytest

from tests.serve.conftest import Server, Start, post

LONG = {
    "messages": [{"role": "user", "content": "x"}],
    "ignore_eos": True,
    "temperature": 1,
}
SMALL = ("--target", "reference", "--max-seats", "2", "--max-context", "512")
NULL = ("--target", "null", "--max-seats", "2", "--max-context", "512")


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}"
    return f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + data


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def in_background(server: Server, body: dict[str, Any], found: list[Any]) -> threading.Thread:
    def ask() -> None:
        found.append(post(server, "/v1/chat/completions", body))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_seat(server: Server, streams: bool) -> None:
    with connect(server) as client:
        client.sendall(raw_request({**LONG, "stream": streams, "n": 3}))
        server.wait_until(lambda: server.gauge("num_requests_running") == 3)
    server.wait_until(lambda: server.gauge("num_requests_running") == 0, seconds=3)
    assert post(server, "/v1/chat/completions", {**LONG, "max_tokens": 2})[0] == 200


BODIES = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}',
)


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/v1/chat/completions", BODIES),
        ("/v1/completions", BODIES),
        ("/tokenize", BODIES[:8]),  # the rest is in fields that it does not read
    ],
)
def test_what_is_no_request_is_400(server: Server, path: str, bodies: tuple[bytes, ...]) -> None:
    for body in bodies:
        status, answer, _ = server.ask("POST", path, body, content_type="application/json")
        assert status == 400, (body[:80], answer)
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


def test_mutated_bodies_and_bytes_never_break_it(server: Server) -> None:
    chooser = random.Random(5)
    whole = json.dumps({**LONG, "max_tokens": 1, "stop": ["a"], "logit_bias": {"3": 1}}).encode()
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(body))
            body[at : at + chooser.randint(0, 3)] = chooser.randbytes(chooser.randint(0, 3))
        status, _, _ = server.ask("POST", "/v1/chat/completions", bytes(body))
        assert status in (200, 400), bytes(body)
    for _ in range(100):
        with connect(server) as client:
            client.sendall(chooser.randbytes(chooser.randint(1, 200)) + b"\r\n\r\n")
    assert post(server, "/v1/chat/completions", {**LONG, "max_tokens": 2})[0] == 200
    assert server.gauge("engine_restarts_total") == 0


def test_other_refusals(server: Server) -> None:
    big = b'{"prompt": "' + b"x" * (9 << 20)
    status, _, headers = server.ask("POST", "/v1/completions", big)
    assert status == 413 and headers["connection"] == "close"
    assert server.ask("POST", "/v1/completions", b"{}", content_type="text/html")[0] == 415
    assert server.ask("GET", "/v1/completions")[0] == 405
    assert server.ask("GET", "/nowhere")[0] == 404
    assert b"embeddings are not computed" in server.ask("POST", "/v1/embeddings")[1]
    assert server.ask("GET", "/health", Origin="http://evil.example")[0] == 403
    assert server.ask("GET", "/health", Origin="http://x", Host="x")[0] == 403
    given = server.ask("GET", "/live", x_request_id="mine")[2]
    assert given["x-request-id"] == "mine"


def test_keys_names_and_a_full_queue(start_server: Start) -> None:
    server = start_server(
        *(*SMALL, "--api-key", "one", "two", "--served-model-name", "first", "second"),
        *("--strict-model", "--max-queue", "1", "--max-seats", "1"),
    )
    assert server.ask("GET", "/v1/models")[0] == 401
    assert server.ask("GET", "/v1/models", authorization="Bearer thre\xe9")[0] == 401
    status, models, _ = server.ask("GET", "/v1/models", authorization="Bearer two")
    assert [model["id"] for model in json.loads(models)["data"]] == ["first", "second"]
    key = {"authorization": "Bearer one"}
    asked = json.dumps({**LONG, "model": "third"}).encode()
    assert server.ask("POST", "/v1/chat/completions", asked, **key)[0] == 404
    waiting = raw_request(LONG).replace(b"\r\n", b"\r\nauthorization: Bearer one\r\n", 1)
    with connect(server) as first, connect(server) as second:
        first.sendall(waiting)
        server.wait_until(lambda: server.gauge("num_requests_running", **key) == 1)
        second.sendall(waiting)
        server.wait_until(lambda: server.gauge("num_requests_waiting", **key) == 1)
        body = json.dumps(LONG).encode()
        status, answer, headers = server.ask("POST", "/v1/chat/completions", body, **key)
        assert (status, json.loads(answer)["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1


def test_sigterm_lets_answers_finish_and_takes_no_more(start_server: Start) -> None:
    server = start_server(*SMALL, "--drain-timeout", "60")
    found: list[Any] = []
    thread = in_background(server, {**LONG, "max_tokens": 150}, found)
    server.wait_until(lambda: server.gauge("num_requests_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.ask("GET", "/health")[0] == 503)
    status, refused = post(server, "/v1/chat/completions", LONG)
    assert (status, refused["error"]["code"]) == (503, "draining")
    thread.join(60)
    assert found[0][0] == 200 and found[0][1]["usage"]["completion_tokens"] == 150
    assert server.process.wait(20) == 0


def test_drain_ends_what_takes_too_long_with_an_error(start_server: Start) -> None:
    server = start_server(*SMALL, "--drain-timeout", "0.2")
    with connect(server) as client:
        client.sendall(raw_request({**LONG, "stream": True}))
        data = client.recv(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        while piece := client.recv(1 << 16):
            data += piece
    assert b'"code":"draining"' in data and b"[DONE]" not in data
    assert server.process.wait(20) == 0


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_sigkill_leaves_no_engine_and_the_port_free(start_server: Start) -> None:
    server = start_server(*NULL)
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server.wait_until(lambda: is_gone(engine), seconds=5)
    again = start_server(*NULL, port=server.port)
    assert again.is_healthy()
    taken = start_server(*NULL, port=server.port, waits=False)
    assert taken.process.wait(60) == 2
    assert taken.log.read_text().count("\n") == 1


def test_an_engine_that_dies_is_started_again(start_server: Start) -> None:
    server = start_server(*SMALL)
    with connect(server) as client:
        client.sendall(raw_request({**LONG, "stream": True}))
        data = client.recv(1 << 16)
        os.kill(server.engine_pid(), signal.SIGKILL)
        while piece := client.recv(1 << 16):
            data += piece
            if b'"error"' in data:
                break
    assert b'"code":"engine_error"' in data and b"[DONE]" not in data
    assert server.ask("GET", "/health")[0] == 503
    server.wait_until(server.is_healthy, seconds=60)
    assert post(server, "/v1/chat/completions", {**LONG, "max_tokens": 2})[0] == 200
    assert server.gauge("engine_restarts_total") == 1


def test_an_engine_that_cannot_start_is_one_line_and_code_2(start_server: Start) -> None:
    server = start_server("--target", "null", "--chat-template", "/nowhere", waits=False)
    assert server.process.wait(60) == 2
    assert server.log.read_text().count("\n") == 1
