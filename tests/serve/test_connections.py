"""What a front does where clients misbehave: requests that do not end, are no HTTP or too much, and
connections that are lost. Counts are read in the process itself.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.serve.fronts import (
    HEAD,
    Running,
    chat,
    is_idle,
    num_descriptors,
    raw,
    read_all,
    running_front,
    wait_until,
)
from tilewright.serve.web.settings import ServerConfig

STREAMS = {
    "/v1/chat/completions": chat("a"),
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
}
ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    """One that all tests share which leave it as it was."""
    with running_front(ServerConfig(header_timeout=1.0, body_timeout=0.5)) as running:
        yield running
        assert is_idle(running)


def test_a_head_that_takes_too_long_ends_its_connection(front: Running) -> None:
    whole = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with front.connect() as first, front.connect() as second:
        first.sendall(whole[:20])
        second.sendall(whole)
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        second.sendall(whole[:20])  # the second request of a connection that was kept
        assert read_all(first) == read_all(second) == b""
        assert time.monotonic() - began < 5


def test_a_body_that_takes_too_long_is_408_and_the_end(front: Running) -> None:
    with front.connect() as client:
        client.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408") and b'"timeout"' in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % at for at in range(100_000)),
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=["line", "path", "headers", "nonsense", "tls", "negative", "two-lengths", "chunk"],
)
def test_what_is_no_http_is_400_in_the_form_of_all_errors(front: Running, head: bytes) -> None:
    with front.connect() as client:
        try:
            client.sendall(head)
        except ConnectionError:
            return  # closed while we were still speaking
        answer = read_all(client)
    if answer:
        assert answer.startswith(b"HTTP/1.") and b" 400 " in answer[:20], answer[:200]
        assert set(json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]) == ERROR_KEYS


@pytest.mark.parametrize("keeps", ["close", "keep-alive", ""])
@pytest.mark.parametrize("path", STREAMS)
def test_stream_http_1_0_ends_with_its_connection(front: Running, path: str, keeps: str) -> None:
    data = json.dumps({**STREAMS[path], "stream": True}).encode()
    head = f"POST {path} HTTP/1.0\r\ncontent-length: {len(data)}\r\n"
    head += f"connection: {keeps}\r\n" if keeps else ""
    with front.connect() as client:
        client.sendall(head.encode() + b"\r\n" + data)
        answer = read_all(client)
    said, _, body = answer.partition(b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.0 200 OK\r\n") and b"text/event-stream" in said
    assert b"chunked" not in said.lower() and b"keep-alive" not in said.lower()
    events = [each.partition(b"data: ")[2] for each in body.removesuffix(b"\n\n").split(b"\n\n")]
    if path == "/v1/responses":
        assert json.loads(events[0])["type"] == "response.created"
        assert json.loads(events[-1])["response"]["output"], "the last event has all of it"
    else:
        assert json.loads(events[0])["choices"] and events[-1] == b"[DONE]"


@pytest.mark.parametrize("declares", [True, False])
def test_a_body_too_large_is_413_and_its_rest_is_not_heard(front: Running, declares: bool) -> None:
    if declares:
        sent = HEAD + b"content-length: 99999999999\r\n\r\n"
    else:
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        sent = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk * 10
    with front.connect() as client:
        try:
            client.sendall(sent)
        except ConnectionError:
            return
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 413") and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


def test_one_connection_too_many_is_503_and_closed() -> None:
    with running_front(ServerConfig(max_connections=2)) as running:
        with accepted(running), accepted(running):
            wait_until(lambda: status_of(running) == 503)
        wait_until(lambda: status_of(running) == 200)


def accepted(running: Running) -> socket.socket:
    """Return a connection that the server keeps. One that ended may still count."""
    while True:
        client = running.connect()
        client.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            if client.recv(1 << 16).startswith(b"HTTP/1.1 200"):
                return client
        client.close()


def status_of(running: Running) -> int:
    try:
        return running.ask("GET", "/live")[0]
    except OSError:  # reset: what we sent was not read
        return 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_does_not_read_is_given_up(streams: bool) -> None:
    settings = ServerConfig(write_timeout=0.6)
    with running_front(settings, send_buffer=4096) as running, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        known = num_descriptors()
        client.connect(("127.0.0.1", running.port))
        body = chat("S" if streams else "a", n=16, max_tokens=4000, stream=streams)
        client.sendall(raw({**body, "return_token_ids": True}))
        if streams:
            wait_until(lambda: running.front.client.num_live == 16)
        other = chat("more")
        assert running.post("/v1/chat/completions", other)[0] == 200  # nothing else waits
        wait_until(lambda: is_idle(running) and num_descriptors() <= known, seconds=10)
        with pytest.raises(ConnectionResetError):
            client.sendall(b"x" * (1 << 20))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_away_is_cancelled(
    front: Running, streams: bool, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with front.connect() as client:
        client.sendall(raw(chat("S", n=3, max_tokens=4000, stream=streams)))
        wait_until(lambda: front.front.client.num_live == 3)
        if how == "half":
            client.shutdown(socket.SHUT_WR)
        elif how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how != "half":
            client.close()
        wait_until(lambda: is_idle(front), seconds=5)
    assert not capfd.readouterr().err, "nobody is at fault"


@pytest.mark.parametrize(
    "count", [600, pytest.param(3_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_nothing_is_left_of_clients_that_misbehave(front: Running, count: int) -> None:
    """Malformed requests, clients that go away and ones that send half a request, in any order."""
    chooser = random.Random(count)
    wait_until(lambda: is_idle(front))
    front.post("/v1/chat/completions", chat("a"))
    known, threads = num_descriptors(), threading.active_count()
    good = raw(chat("Sx", stream=True, max_tokens=500))
    for at in range(count):
        with front.connect() as client:
            kind = at % 4
            if kind == 0:
                client.sendall(good)
                if at % 8:
                    client.recv(1 << 12)
            elif kind == 1:
                client.sendall(good[: chooser.randrange(len(good))])
            elif kind == 2:
                client.sendall(HEAD + b"content-length: 3\r\n\r\n" + chooser.randbytes(3))
                assert b" 400 " in client.recv(1 << 12)
            else:
                client.sendall(chooser.randbytes(200) + b"\r\n\r\n")
    wait_until(lambda: is_idle(front) and num_descriptors() <= known, seconds=10)
    assert threading.active_count() <= threads + 2  # of the texts
    assert front.post("/v1/chat/completions", chat("a"))[0] == 200
