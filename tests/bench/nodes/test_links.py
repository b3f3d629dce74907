"""Machines of network namespaces: taken away whatever ends a run, and refused where none can be."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.nodes import links
from bench.nodes.links import Link, address, inside, machines, read_link
from tilewright.errors import ConfigError

RATE = Link(1.0)


def test_a_machine_without_the_programs_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="allowed: root, with ip"), machines(2, RATE):
        pass


_IP = """#!/bin/sh
echo "$*" >> "$TOLD"
case "$1 $2" in
"netns add") : > "$FOUND/namespaces/$3" ;;
"netns del") rm -f "$FOUND/namespaces/$3" ;;
"link add") : > "$FOUND/links/$3" ;;
"link del") rm -f "$FOUND/links/$3" ;;
esac
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a false `ip` writes its arguments to; names it makes are files beside it."""
    for name, place in (("namespaces", "_NAMESPACES"), ("links", "_LINKS")):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(links, place, tmp_path / name)
    (tmp_path / "ip").write_text(_IP)
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setattr(links, "_joined", lambda ends, link: contextlib.nullcontext())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FOUND", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path / "told"


def _left(told: Path) -> list[str]:
    places = (told.parent / "namespaces", told.parent / "links")
    return sorted(each.name for place in places for each in place.iterdir())


def test_what_a_larger_run_left_that_was_killed_is_taken_away(told: Path) -> None:
    for node in range(4):
        (told.parent / "namespaces" / f"twn{node}").touch()
        (told.parent / "links" / f"twnh{node}").touch()
    with machines(2, RATE):
        assert _left(told) == ["twn0", "twn1", "twnh0", "twnh1"]
    assert _left(told) == []


def test_a_run_that_is_terminated_takes_its_machines_away(told: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), machines(3, RATE):
        os.kill(os.getpid(), signal.SIGTERM)
    assert _left(told) == [] and "netns add twn2" in told.read_text()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_link_is_a_rate_with_or_without_a_delay() -> None:
    assert read_link("2.5") == Link(2.5) and read_link("1+250us") == Link(1.0, 250)
    for text in ("fast", "0", "1+100", "1+-1us", "1+1000000us", "101"):
        with pytest.raises(ConfigError, match=r"allowed: free, or gigabits a second"):
            read_link(text)


_SIZE, _SENT, _TRIPS, _DELAY_US = 8 << 20, 50_000, 20, 1000
_ECHO = f"""
import socket, sys, time, zlib
host, here = sys.argv[1], sys.argv[2:] == ["here"]
if here:
    with socket.create_server((host, 5000)) as server:
        other = server.accept()[0]
else:
    end = time.monotonic() + 20
    while True:
        try:
            other = socket.create_connection((host, 5000))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)
other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
data = bytes(range(251)) * ({_SIZE} // 251)
if here:
    for _ in range({_TRIPS}):
        other.sendall(other.recv({_SENT}, socket.MSG_WAITALL))
    other.sendall(data)
else:
    took = []
    for _ in range({_TRIPS}):
        began = time.perf_counter()
        other.sendall(data[:{_SENT}])
        other.recv({_SENT}, socket.MSG_WAITALL)
        took.append(time.perf_counter() - began)
    began, found = time.perf_counter(), b""
    while chunk := other.recv(1 << 20):
        found += chunk
    seconds = time.perf_counter() - began
    assert zlib.crc32(found) == zlib.crc32(data)
    print(1e6 * min(took), 8e-9 * len(data) / seconds)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or None in map(shutil.which, ("ip", "g++")),
    reason="machines need root, ip and g++",
)
def test_frames_arrive_whole_at_the_rate_and_so_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_NAME", "twt")  # beside a bench-nodes that runs
    command = [sys.executable, "-c", _ECHO, address(0)]
    try:
        with machines(2, Link(1.0, _DELAY_US)):
            server = subprocess.Popen([*inside(0), *command, "here"])
            try:
                said = subprocess.check_output([*inside(1), *command], timeout=60)
            finally:
                server.kill()
                server.wait()
    except ConfigError as error:
        if not str(error).startswith("ip "):
            raise
        pytest.skip(str(error))
    round_trip_us, gigabits = map(float, said.split())
    least = 2 * (_DELAY_US + 8e-3 * _SENT)  # no burst is let through at once
    assert least <= round_trip_us < 3 * least
    assert gigabits < 1
