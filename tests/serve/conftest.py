"""A server in separate processes, on loopback, on a tiny random Llama."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import tiny_gguf
from tests.serve.asked import Asked

__all__ = ["Server", "post", "server", "start_server", "tiny_gguf"]

_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Server(Asked):
    """A running server. ``log`` is the file with its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path)[1])

    def gauge(self, name: str, **headers: str) -> float:
        """Return the sum of a metric over all labels."""
        text = self.ask("GET", "/metrics", **headers)[1].decode()
        lines = [line for line in text.splitlines() if line.startswith(f"tilewright:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_until(self, is_so: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def engine_pid(self) -> int:
        return self.engine_pids()[0]

    def engine_pids(self) -> list[int]:
        """Return the engines' process ids, the oldest first."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, check=True
        )
        return sorted(int(each) for each in found.stdout.split())


def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    """Post a JSON body. Return status and answer."""
    data = json.dumps(body).encode()
    status, answer, _ = server.ask("POST", path, data, content_type="application/json")
    return status, json.loads(answer)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Start = Callable[..., Server]


@contextmanager
def _starting(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yield a function that starts servers. Kill the remaining servers afterwards."""
    running = []

    def start(
        *argv: str, port: int | None = None, waits: bool = True, model: Path = tiny_gguf
    ) -> Server:
        log = tmp_path_factory.mktemp("serve") / "log"
        port = free_port() if port is None else port
        command = [sys.executable, "-P", "-m", "tilewright.cli.main", "serve", str(model)]
        threads = () if "--threads" in argv else ("--threads", "1")
        command += ["--port", str(port), *threads, *argv]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ)
        server = Server(port, process, log)
        running.append(server)
        if waits:
            server.wait_until(lambda: server.is_healthy() or process.poll() is not None, _PATIENCE)
        return server

    try:
        yield start
    finally:
        for server in running:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()


@pytest.fixture(scope="module")
def start_server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers for a module. An idle server of the session costs CPU time until its end."""
    with _starting(tiny_gguf, tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A shared server, for tests without lasting effects on it."""
    with _starting(tiny_gguf, tmp_path_factory) as start:
        yield _shared(start, "cpu", max_context=512)


@pytest.fixture(scope="session")
def slow_server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A shared server on the reference target: a generation lasts until a client stops it, longer
    than an engine's report period of one second.
    """
    with _starting(tiny_gguf, tmp_path_factory) as start:
        yield _shared(start, "reference", max_context=1536)


def _shared(start: Start, target: str, *, max_context: int) -> Server:
    options = ("--max-seats", "4", "--max-context", str(max_context), "--tool-format", "hermes")
    started = start("--target", target, *options)
    assert started.process.poll() is None, started.log.read_text()
    return started
