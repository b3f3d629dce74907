"""``demo/serve_ray.py`` on a Ray of this machine: requests while every replica is replaced."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.asked import Asked
from tests.serve.conftest import free_port

pytest.importorskip("ray", reason="ray is not installed: the extra `ray`")

SCRIPT = Path(__file__).resolve().parents[2] / "demo" / "serve_ray.py"
REQUESTS, USERS, TOKENS = 200, 8, 40
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


@contextmanager
def deployed(log: Path, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script, and its cluster, until the block ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *argv], stdout=file, stderr=file, env=ENVIRONMENT
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def said(log: Path, process: subprocess.Popen[bytes], pattern: str) -> str:
    deadline = time.monotonic() + 240
    while (found := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return found[1]


def ask(server: Asked, number: int) -> Any:
    """The text of an answer; streamed ones are joined from their events."""
    body = {"prompt": f"{number} begins", "max_tokens": TOKENS, "ignore_eos": True}
    streams = number % 2 == 0
    data = json.dumps({**body, "stream": streams, "return_token_ids": True}).encode()
    status, answer, _ = server.ask("POST", "/v1/completions", data)
    assert status == 200, answer
    if not streams:
        return json.loads(answer)["usage"]["completion_tokens"]
    events = [line[6:] for line in answer.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]", answer[-300:]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return sum(len(choice.get("token_ids") or ()) for choice in choices)


@pytest.mark.slow
def test_no_request_is_lost_while_every_replica_is_replaced(tmp_path: Path) -> None:
    server, log = Asked(free_port()), tmp_path / "log"
    options = ["--ray-replicas", "2", "--cpus", "0.5", "--ray-port", str(server.port)]
    model = ["shape:tiny", "--target", "null", "--max-seats"]
    with deployed(log, *options, *model, "4") as process:
        address = said(log, process, r"cluster (\S+)")
        assert json.loads(ask_props(server))["total_slots"] == 4
        counts: list[Any] = []
        numbers = iter(range(REQUESTS))
        lock, is_replaced = threading.Lock(), threading.Event()

        def run() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    counts.append(ask(server, number))
                except Exception as error:
                    counts.append(error)
                if not is_replaced.is_set():
                    time.sleep(0.5)  # so that they last until all are replaced

        users = [threading.Thread(target=run) for _ in range(USERS)]
        for user in users:
            user.start()
        redeploy = [sys.executable, str(SCRIPT), "--address", address, *options, *model, "6"]
        done = subprocess.run(
            redeploy, capture_output=True, text=True, timeout=240, env=ENVIRONMENT
        )
        is_replaced.set()
        assert done.returncode == 0, done.stderr[-2000:]
        at_the_end = len(counts)
        for user in users:
            user.join(120)
        assert counts == [TOKENS] * REQUESTS, [each for each in counts if each != TOKENS]
        assert at_the_end > USERS, "some were answered beside it"
        assert json.loads(ask_props(server))["total_slots"] == 6


def ask_props(server: Asked) -> bytes:
    status, body, _ = server.ask("GET", "/props")
    assert status == 200, body
    return body
