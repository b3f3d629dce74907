"""A child process: how it ends, what it leaves behind, how it is talked with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.errors import ConfigError
from tilewright.utils import child_process as child_module
from tilewright.utils.child_process import PYTHON, Child

SHELL = ("/bin/sh", "-c")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def within(seconds: float, happens: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not (is_met := bool(happens())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_met


def gone(pid: int) -> bool:
    return within(10, lambda: not is_running(pid))


def test_how_it_ended_and_what_it_said() -> None:
    with Child([*SHELL, "echo out; echo one >&2; echo two >&2; echo >&2; exit 3"]) as child:
        ended = child.wait()
        assert ended is not None
        assert (ended.code, ended.how, ended.last) == (3, "exit code 3", "two")
        assert not ended.is_timed_out and not ended.is_out_of_memory
        assert child.output() == b"out\n"


def test_a_time_limit_ends_all_that_it_started(tmp_path: Path) -> None:
    """The limit ends the child in `wait` only, so a slow start has time to write the number."""
    path = tmp_path / "pid"
    program = f"sleep 600 & echo $! > {path}; sleep 600"
    with Child([*SHELL, program], timeout_s=0.3) as child:
        assert within(60, lambda: path.exists() and path.read_text())
        ended = child.wait()
    assert ended is not None and ended.is_timed_out
    assert gone(int(path.read_text()))


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tilewright.utils.child_process import Child\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(Child(['sleep', '600']).pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert gone(int((tmp_path / "pid").read_text()))


def test_it_is_talked_with_line_by_line() -> None:
    with Child([*SHELL, "while read x; do echo got $x; done"], has_pipes=True) as child:
        child.write(b"one\ntwo\n")
        assert child.read_line(10) == b"got one\n"
        assert child.read_line(10) == b"got two\n"
        assert child.read_line(0.05) is None
        assert child.close(10).code == 0


def test_the_end_of_its_output_and_its_time() -> None:
    with Child([*SHELL, "printf half; exit 4"], has_pipes=True) as child:
        assert child.read_line(10) == b"half"
        assert child.read_line(10) == b""
        assert (ended := child.wait()) is not None and ended.code == 4
    with Child(["sleep", "600"], has_pipes=True, timeout_s=0.2) as child:
        assert child.read() is None
        assert (ended := child.wait()) is not None and ended.is_timed_out


def test_the_end_of_a_block_stops_it() -> None:
    with Child(["sleep", "600"]) as child:
        assert child.wait(0.05) is None
    assert gone(child.pid)


def test_an_interrupt_reaches_it_where_its_parent_hears_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under ``nohup`` or ``&``; a shell cannot trap what was ignored when it started. It loops,
    for an interrupt that comes just before `wait` is not always noticed.
    """
    monkeypatch.setattr(child_module, "_ENDING_SECONDS", 60.0)
    program = "trap 'echo took back; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Child([*SHELL, program], has_pipes=True) as child:
            assert child.read_line(10) == b"ready\n"
            assert child.stop().code == 5
            assert child.read_line(10) == b"took back\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the engine cannot be started \(No such file"):
        Child([str(tmp_path / "none")], what="the engine")


def test_a_python_child_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with Child([*PYTHON, "-c", "import json"], environment={"X": os.sep}) as child:
        assert (ended := child.wait()) is not None and ended.code == 0
