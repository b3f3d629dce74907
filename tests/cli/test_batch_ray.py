"""Ray Data under ``tilewright batch``: an actor that is killed costs nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.test_batch import command, lines_of, make_set
from tilewright.utils.child_process import PYTHON

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def actors_under(pid: int) -> list[int]:
    """The processes of Ray's actors that a process has started, or its children have."""
    parents, found = {}, []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parents[int(place.name)] = int(
                    (place / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if b"MapWorker" in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue

    def descends(child: int) -> bool:
        while child and child != pid:
            child = parents.get(child, 0)
        return child == pid

    return [each for each in found if descends(each)]


def test_an_actor_killed_in_the_middle_leaves_every_row_once(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    data, out = make_set(tmp_path / "set.json", 2000), tmp_path / "out.jsonl"
    journal = out.with_name("out.jsonl.journal")
    spread = ("--engine", "ray", "--actors", "2", "--threads", "1")
    asked = [*command(data, out, tiny_gguf, *spread), "--ignore-eos"]
    child = subprocess.Popen(
        [*PYTHON, "-m", "tilewright.cli.main", "batch", *asked], stderr=subprocess.PIPE
    )
    killed: list[int] = []
    while child.poll() is None:
        if not killed and journal.exists() and journal.read_bytes().count(b"\n") > 300:
            killed = actors_under(child.pid)[:1]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            assert journal.read_bytes().count(b"\n") < 1900, "it was the middle"
        time.sleep(0.01)
    _, said = child.communicate()
    assert child.returncode == 0, said.decode()
    assert killed
    found = lines_of(out)
    rows = json.loads(data.read_text())
    assert [each["prompt"] for each in found] == [row[0] for row in rows]
    assert [each["completion_tokens"] for each in found] == [row[2] for row in rows]
