"""Ten thousand idle connections, and what a request costs that waits; a server of no model."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.serve.conftest import Server, free_port
from tests.serve.fronts import running_front, wait_until
from tests.serve.test_faults import connect, raw_request
from tilewright.serve.web.settings import ServerConfig

SCRIPT = Path(__file__).with_name("serve_fake.py")
IDLE, WAITING = 10_000, 400
CHAT = "/v1/chat/completions"
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
MAX_CONNECTION = 10_000
MAX_OURS, MAX_WITH_HTTP = 7_000, 12_500  # ours differ by some hundred bytes from run to run
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def served(log: Path) -> Iterator[Server]:
    """A server that takes as many as come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"{hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    changes = ("max_connections=12000", "max_queue=20000", "header_timeout=600")
    port = free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), *changes], stdout=file, stderr=file
        )
    server = Server(port, process, log)
    try:
        server.wait_until(server.is_healthy, seconds=60)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory(server: Server) -> int:
    """Bytes of the front that are in memory, once they stay the same."""
    found = [0, 1]
    while found[-1] != found[-2]:
        time.sleep(1)
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        found.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
    return found[-1]


def num_descriptors(server: Server) -> int:
    """Open ones of the front: connections that are made wait for it where others compute."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def computed_seconds(server: Server) -> float:
    """What the front has computed so far, which other work on the machine does not stretch."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ten_thousand_idle_connections_cost_memory_alone(tmp_path: Path) -> None:
    with served(tmp_path / "log") as server:
        held = []
        for _ in range(2):
            before = memory(server)
            with ExitStack() as clients:
                for _ in range(IDLE):
                    clients.enter_context(connect(server))
                server.wait_until(lambda: num_descriptors(server) > IDLE, seconds=300)
                held.append(memory(server))
                before_s = computed_seconds(server)
                assert server.ask("GET", "/health")[0] == 200
                assert computed_seconds(server) - before_s < 1
                assert (held[-1] - before) / IDLE < MAX_CONNECTION
            server.wait_until(lambda: num_descriptors(server) < 100, seconds=300)
        assert held[1] <= 1.02 * held[0], "the second time they cost no more"


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_waits_is_small(streams: bool) -> None:
    """Beside its connection, which has been used and is kept; as Python counts its objects. Its
    body is not kept.
    """
    chat = {"messages": [{"role": "user", "content": "W"}], "max_tokens": 4, "stream": streams}
    chat["note"] = 4_000 * "x"
    with running_front(ServerConfig(max_queue=WAITING)) as running, ExitStack() as stack:
        clients = [stack.enter_context(running.connect()) for _ in range(WAITING)]

        def ask(data: bytes) -> None:
            for client in clients:
                client.sendall(data)

        warm = {**chat, "messages": [{"role": "user", "content": "a"}]}
        assert running.ask("POST", CHAT, json.dumps(warm).encode())[0] == 200
        ask(LIVE)
        for client in clients:
            assert client.recv(1 << 12).startswith(b"HTTP/1.1 200")
        tracemalloc.start()
        try:
            ask(raw_request(chat))
            wait_until(lambda: running.front.client.num_waiting == WAITING)
            gc.collect()
            every = tracemalloc.take_snapshot().statistics("filename")
        finally:
            tracemalloc.stop()
    ours = [each for each in every if is_ours(each.traceback[0].filename)]
    assert sum(each.size for each in ours) / WAITING <= MAX_OURS
    assert sum(each.size for each in every) / WAITING <= MAX_WITH_HTTP


def is_ours(name: str) -> bool:
    """Whether a place is in our sources, or in what dataclasses make of them."""
    is_installed = "site-packages" in name
    return name == "<string>" or (name.startswith(str(ROOT)) and not is_installed)
