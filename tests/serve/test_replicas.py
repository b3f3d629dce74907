"""Several engines behind one front: what one that is late, lost or unlike costs its clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

from tests.serve.fronts import Running, running_front, wait_until
from tests.serve.test_api_server import chat, is_idle, raw
from tilewright.serve.web.settings import Replica, ServerConfig

TWO = ServerConfig(engines=(Replica(), Replica()))
LONG = "x" * 200
"""Two full pages and a half, of the 64 tokens by which prompts are told apart."""


def health(running: Running) -> tuple[int, dict[str, Any]]:
    status, body, _ = running.ask("GET", "/health")
    return status, json.loads(body)


def prompts_of(running: Running) -> list[float]:
    """How many prompts each engine has answered."""
    text = running.ask("GET", "/metrics")[1].decode()
    found = re.findall(r'request_prompt_tokens_count{engine="(\d)",.*} (.*)', text)
    return [float(count) for _, count in sorted(found)]


def stream(running: Running, text: str, *, max_tokens: int = 4000) -> socket.socket:
    client = running.connect()
    client.sendall(raw(chat(text, stream=True, max_tokens=max_tokens)))
    return client


def read_until(client: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = client.recv(1 << 16)
        assert piece, data[-300:]
        data += piece
    return data


def test_it_is_healthy_once_all_are_up_and_says_who_is_missing() -> None:
    late = Replica(environment={"FAKE_LATE": "1.5"})
    with running_front(ServerConfig(engines=(Replica(), late)), waits=False) as running:
        wait_until(lambda: running.front.client.engines[0].state == "ready")
        assert health(running) == (503, {"status": "loading", "replicas": 2, "missing": [1]})
        assert running.post("/v1/chat/completions", chat("a"))[1]["error"]["code"] == "loading"
        wait_until(lambda: health(running)[0] == 200)
        assert health(running)[1] == {"status": "ok", "replicas": 2, "missing": []}
        props = json.loads(running.ask("GET", "/props")[1])
        assert props["total_slots"] == 8 and props["replicas"] == 2


def test_what_begins_alike_goes_where_it_is_and_the_rest_is_spread() -> None:
    with running_front(TWO) as running:
        for _ in range(4):
            assert running.post("/v1/chat/completions", chat(LONG))[0] == 200
        assert sorted(prompts_of(running)) == [0, 4]
        for number in range(4):
            assert running.post("/v1/chat/completions", chat(f"{number}" * 200))[0] == 200
        assert sorted(prompts_of(running)) == [2, 6]
        text = running.ask("GET", "/metrics")[1].decode()
        for name in ("engine_restarts_total", "request_success_total", "num_requests_running"):
            assert re.search(rf'{name}{{engine="1"', text), name
        assert re.search(r'engine_process_resident_memory_bytes{engine="1"} [1-9]', text)
        assert text.count("# TYPE tilewright:request_prompt_tokens ") == 1


def test_a_lost_replica_costs_what_ran_on_it_alone() -> None:
    with running_front(TWO) as running:
        client = running.front.client
        router = client._tracker.router
        with contextlib.ExitStack() as streams:
            waited = streams.enter_context(stream(running, "W", max_tokens=4))
            wait_until(lambda: client.num_waiting == 1)  # the first never begins it
            beside = streams.enter_context(stream(running, "Sx", max_tokens=300))
            read_until(beside, b"content")
            ran = streams.enter_context(stream(running, "Sy", max_tokens=1000))
            read_until(ran, b"content")
            assert router.loads[0] > 500 > router.loads[1], "two of them are on the first"
            os.kill(client.engines[0].pid, signal.SIGKILL)
            failed = read_until(ran, b'"error"')
            assert b'"engine_error"' in failed and b"replica 0 ended (SIGKILL)" in failed
            assert b"[DONE]" not in failed
            assert health(running) == (200, {"status": "ok", "replicas": 2, "missing": [0]})
            assert b'"length"' in read_until(waited, b"[DONE]"), "the other has answered it"
            assert b'"length"' in read_until(beside, b"[DONE]")
        wait_until(lambda: health(running)[1].get("missing") == [] and is_idle(running))
        assert [each.num_restarts for each in client.engines] == [1, 0]
        assert router.loads == [0, 0]
        for _ in range(2):  # both take requests again
            assert running.post("/v1/chat/completions", chat(str(time.time())))[0] == 200
        assert min(prompts_of(running)) > 0


def test_the_last_replica_serves_alone_and_ends_the_server_with_it() -> None:
    with running_front(TWO) as running:
        client = running.front.client
        for engine in (1, 0):
            for number in range(4):
                process = client.engines[engine]
                wait_until(lambda p=process, n=number: p.num_restarts == n and p.is_healthy)
                os.kill(process.pid, signal.SIGKILL)
            if engine:
                wait_until(lambda: client.engines[1].state == "down")
                time.sleep(0.2)
                assert health(running) == (200, {"status": "ok", "replicas": 2, "missing": [1]})
                assert running.post("/v1/chat/completions", chat("a"))[0] == 200
        wait_until(client.ended.done)
        assert client.ended.result().startswith("1 replica 0 ended (SIGKILL)")
        assert health(running)[1]["status"] == "engine down"


def test_a_replica_that_serves_another_thing_is_refused() -> None:
    other = Replica(environment={"FAKE_PRECISION": "{other}", "FAKE_LATE": "0.3"})
    with running_front(ServerConfig(engines=(Replica(), other)), waits=False) as running:
        wait_until(running.front.client.ended.done)
        said = "2 replica 1: precision {other}; allowed: {}, as the others have"
        assert running.front.client.ended.result() == said


def test_replicas_have_arguments_variables_and_cores_of_their_own() -> None:
    core = min(os.sched_getaffinity(0))
    replicas = (Replica(), Replica(arguments=("--one",), environment={"A": "b"}, cores=(core,)))
    with running_front(ServerConfig(engines=replicas)) as running:
        first, second = (each.pid for each in running.front.client.engines)
        assert os.sched_getaffinity(second) == {core}
        assert os.sched_getaffinity(first) == os.sched_getaffinity(0)
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (first, second)]
        assert ["--one" in command for command in commands] == [False, True]
        assert "A=b" in Path(f"/proc/{second}/environ").read_text().split("\0")
