"""Clients that misbehave and processes that die; each with real processes on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, Start, free_port, post

LONG = {
    "messages": [{"role": "user", "content": "x"}],
    "ignore_eos": True,
    "temperature": 1,
}
SMALL = ("--target", "cpu", "--max-seats", "2", "--max-context", "512")
SLOW = ("--target", "reference", *SMALL[2:])
"""An answer that is to be cut short must not be at its end before."""


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
def test_a_client_that_goes_away_frees_its_slot(slow_server: Server, streams: bool) -> None:
    server = slow_server
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


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_sigkill_leaves_no_engine_and_the_port_free(start_server: Start) -> None:
    server = start_server(*SMALL)
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server.wait_until(lambda: is_gone(engine), seconds=5)
    again = start_server(*SMALL, port=server.port)
    assert again.is_healthy()
    taken = start_server(*SMALL, port=server.port, waits=False)
    assert taken.process.wait(60) == 2
    assert taken.log.read_text().count("\n") == 1


def test_an_engine_that_dies_is_started_again(start_server: Start) -> None:
    server = start_server(*SLOW)
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


@pytest.mark.slow
def test_a_killed_replica_costs_its_own_answers_alone(start_server: Start) -> None:
    """With engines that compute; `test_replicas.py` has the same of engines made up for it."""
    server = start_server(*SLOW, "--replicas", "2", "--threads", "2")
    assert server.get("/health") == {"status": "ok", "replicas": 2, "missing": []}
    first, _ = server.engine_pids()
    with connect(server) as client:
        client.sendall(raw_request({**LONG, "stream": True}))
        data = client.recv(1 << 16)
        found: list[Any] = []
        asked = {**LONG, "max_tokens": 8}
        threads = [in_background(server, asked, found) for _ in range(6)]
        os.kill(first, signal.SIGKILL)
        while b'"error"' not in data and (piece := client.recv(1 << 16)):
            data += piece
    for thread in threads:
        thread.join(60)
    failed = [answer for status, answer in found if status != 200]
    assert b'"code":"engine_error"' in data and b"replica 0 ended (SIGKILL)" in data
    assert len(found) == 6 and len(failed) <= 2, "those that ran on it, at most its slots"
    assert server.get("/health") in [
        {"status": "ok", "replicas": 2, "missing": missing} for missing in ([0], [])
    ]
    server.wait_until(lambda: server.get("/health")["missing"] == [], seconds=60)
    assert len(server.engine_pids()) == 2 and server.gauge("engine_restarts_total") == 1
    assert post(server, "/v1/chat/completions", asked)[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def test_an_engine_that_cannot_start_is_one_line_and_code_2(start_server: Start) -> None:
    server = start_server("--target", "null", "--chat-template", "/nowhere", waits=False)
    assert server.process.wait(60) == 2
    assert server.log.read_text().count("\n") == 1


def test_detach_tells_its_own_server_from_another(tmp_path: Path, tiny_gguf: Path) -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "tilewright.cli.main", "serve", str(tiny_gguf)]
    command += [*SMALL, "--port", str(port), "--detach", "--log"]
    found = subprocess.run(
        [*command, str(tmp_path / "one")], capture_output=True, text=True, timeout=120, check=True
    )
    said = re.search(r"pid (\d+), port (\d+), log (.+)", found.stdout)
    assert said is not None and int(said[2]) == port
    try:
        other = subprocess.run(
            [*command, str(tmp_path / "two")], capture_output=True, text=True, timeout=120
        )
        assert other.returncode == 2 and f"port {port}" in other.stderr and not other.stdout
    finally:
        os.kill(int(said[1]), signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not is_gone(int(said[1])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
