"""Signals, kills and full disks: servers in processes of their own, with an engine of no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.serve.conftest import Server, free_port
from tests.serve.test_faults import connect, in_background, is_gone, raw_request
from tilewright.serve.engines.run_folders import PREFIX, MeetingFolder, remove_stale

SCRIPT = Path(__file__).with_name("serve_fake.py")
Start = Callable[..., Server]


def body(text: str, **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **changes}


@pytest.fixture
def where() -> Iterator[Path]:
    """A temporary folder of a short name: a socket's path has about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        yield Path(folder)


@pytest.fixture
def start(where: Path) -> Iterator[Start]:
    """Starts servers, whose folders lie in a place of their own; kills those that still run."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*changes: str, port: int | None = None, out: IO[bytes] | None = None) -> Server:
        log = where / "log"
        port = port or free_port()
        environment = {**os.environ, "TMPDIR": str(where)}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(port), *changes],
                stdout=out or file,
                stderr=out or file,
                env=environment,
            )
        running.append(process)
        server = Server(port, process, log)
        server.wait_until(lambda: server.is_healthy() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        return server

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


def folders(where: Path) -> list[Path]:
    return list(where.glob(f"{PREFIX}*"))


def test_sigterm_lets_answers_finish_and_takes_no_more(start: Start, where: Path) -> None:
    server = start()
    found: list[Any] = []
    thread = in_background(server, body("S", max_tokens=100), found)
    server.wait_until(lambda: server.gauge("num_requests_running") == 1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.ask("GET", "/health")[0] == 503)
    assert server.get("/health") == {"status": "draining"}
    status, answer, headers = server.ask("POST", "/v1/completions", b'{"prompt": "x"}')
    assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
    assert headers["retry-after"]
    thread.join(20)
    assert found[0][0] == 200 and found[0][1]["usage"]["completion_tokens"] == 100
    assert server.process.wait(10) == 0 and not folders(where)


def test_a_slow_start_is_reported_in_plain_lines(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LATE", "1.5")
    lines = start().log.read_text().splitlines()
    assert "weights ..." in lines and "tilewright: a note" in lines
    assert lines.count("weights ...") == 1 and "weights 25 %" not in lines


@pytest.mark.parametrize("how", ["timeout", "signal"])
def test_what_takes_too_long_to_drain_gets_an_error_event(start: Start, how: str) -> None:
    server = start("drain_timeout=0.3" if how == "timeout" else "drain_timeout=60")
    engine = server.engine_pid()
    with connect(server) as client:
        client.sendall(raw_request(body("S", stream=True, max_tokens=4000)))
        data = client.recv(1 << 16)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if how == "signal":
            server.wait_until(lambda: server.ask("GET", "/health")[0] == 503)
            server.process.send_signal(signal.SIGTERM)
        while piece := client.recv(1 << 16):
            data += piece
    assert b'"code":"draining"' in data and b"[DONE]" not in data
    assert server.process.wait(10) == 0 and time.monotonic() - began < 8
    assert is_gone(engine)


def test_a_killed_front_leaves_no_engine_and_its_folder_to_the_next(
    start: Start, where: Path
) -> None:
    server = start()
    engine = server.engine_pid()
    (left,) = folders(where)
    server.process.kill()
    server.process.wait()
    server.wait_until(lambda: is_gone(engine), seconds=5)
    assert left.exists()
    again = start(port=server.port)
    assert again.is_healthy() and not left.exists() and len(folders(where)) == 1


def test_a_full_disk_for_what_it_says_stops_nothing(start: Start) -> None:
    with Path("/dev/full").open("wb") as full:
        server = start(out=full)
    assert server.process.poll() is None
    os.kill(server.engine_pid(), signal.SIGKILL)  # which it would tell of
    server.wait_until(lambda: server.gauge("engine_restarts_total") == 1)
    server.wait_until(server.is_healthy)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == 0


def test_only_folders_of_the_dead_are_removed(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    living = MeetingFolder()
    young, old = where / f"{PREFIX}young", where / f"{PREFIX}old"
    other, link = where / "other", where / f"{PREFIX}link"
    for each in (young, old, other):
        each.mkdir()
        (each / "x").touch()
    link.symlink_to(other)
    (where / f"{PREFIX}a.log").touch()
    os.utime(old, (0, 0))
    remove_stale()
    assert living.path.exists() and young.exists() and other.exists() and link.exists()
    assert not old.exists() and (where / f"{PREFIX}a.log").exists()
    living.remove()
    assert not living.path.exists()
