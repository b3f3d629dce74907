"""A cell's process: what it says when, what is kept of it, how it is ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep_cells import cell, speed_result
from tilewright.errors import ConfigError
from tilewright.evaluate.results.result_file import dumps
from tilewright.evaluate.sweep import runner
from tilewright.evaluate.sweep.journal import TrialFinished
from tilewright.evaluate.sweep.runner import BENCH, finished, launcher
from tilewright.utils import child_process as child
from tilewright.utils.child_process import Child

CELL = cell()
RESULT = speed_result(CELL, [100.0])
LINE = dumps(RESULT)


def start(program: str, log: Path, *, timeout_s: float = 60.0, **options: object) -> Child:
    command = ("/bin/sh", "-c", program)
    return Child(command, log=log, timeout_s=timeout_s, **options)  # type: ignore[arg-type]


def ended(process: Child) -> TrialFinished:
    with process:
        end = process.wait(60)
        assert end is not None, "the process did not end"
        return finished(CELL, end, process.output())


def printed(text: str | bytes, tmp_path: Path, after: str = "") -> TrialFinished:
    """Of a process that prints this."""
    path = tmp_path / "output"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return ended(start(f"cat '{path}'; {after}", tmp_path / "x.log"))


def test_the_last_line_is_the_result(tmp_path: Path) -> None:
    ending = printed(f"Loading...\n{{}}\n\n{LINE}\n", tmp_path)
    assert (ending.outcome, ending.result, ending.reason) == ("done", RESULT.to_dict(), "")
    assert 0 < ending.seconds < 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LINE + "\nand then some", "exit code 0"),
        (LINE[:-1], "exit code 0"),
        (b"\xff\xfe\x00", "exit code 0"),
        ("[]\n", "Expected `object`, got `array`"),
        ("NaN\n", "JSON is malformed"),
        ("[" * 100_000, "exit code 0"),
        (json.dumps({**json.loads(LINE), "kind": "\x1b[31m"}), "kind"),
        (json.dumps({**json.loads(LINE), "x" * 5000: 1}), ""),
        (LINE.replace("100.0", "1e999"), ""),
    ],
    ids=range(9),
)
def test_output_that_is_no_result_is_a_failure_in_one_line(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    ending = printed(text, tmp_path)
    assert (ending.outcome, ending.result) == ("failed", None)
    assert said in ending.reason and ending.reason.isprintable()
    assert 0 < len(ending.reason) <= 300


def test_a_result_of_a_run_that_failed_does_not_count(tmp_path: Path) -> None:
    ending = printed(LINE, tmp_path, after="echo broken >&2; exit 3")
    assert (ending.outcome, ending.result) == ("failed", None)
    assert ending.reason == "exit code 3: broken"


def test_the_reason_is_what_this_attempt_said_last(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    first = ended(start("echo 'out of memory' >&2; exit 1", log))
    second = ended(start("echo one >&2; echo two >&2; echo >&2; exit 2", log))
    third = ended(start("exit 4", log))
    assert (first.outcome, first.reason) == ("out of memory", "exit code 1: out of memory")
    assert (second.outcome, second.reason) == ("failed", "exit code 2: two")
    assert (third.outcome, third.reason) == ("failed", "exit code 4: said nothing")
    assert log.read_text() == "out of memory\none\ntwo\n\n"  # all attempts are kept


@pytest.mark.parametrize("said", ["std::bad_alloc", "Cannot allocate memory", "MemoryError: x"])
def test_who_complains_of_memory_was_out_of_it(said: str, tmp_path: Path) -> None:
    ending = ended(start(f"echo '{said}' >&2; echo bye >&2; exit 1", tmp_path / "x.log"))
    assert ending.outcome == "out of memory" and ending.reason == "exit code 1: bye"


def test_a_long_complaint_is_cut(tmp_path: Path) -> None:
    program = "head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1"
    ending = ended(start(program, tmp_path / "x.log"))
    assert len(ending.reason) == 300 and ending.reason.startswith("exit code 1: xxx")
    assert (tmp_path / "x.log").stat().st_size == 100_000


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
def test_a_signal_is_named(number: int, name: str, tmp_path: Path) -> None:
    ending = ended(start(f"kill -{number} $$", tmp_path / "x.log"))
    assert (ending.outcome, ending.reason) == ("failed", f"killed by {name}: said nothing")


def test_a_cell_that_is_stopped_was_cancelled(tmp_path: Path) -> None:
    process = start(f"echo '{LINE}'; sleep 600", tmp_path / "x.log")
    assert process.poll() is None
    ending = finished(CELL, process.stop(), process.output(), is_cancelled=True)
    process.close()
    assert (ending.outcome, ending.result) == ("cancelled", None)
    assert ending.reason.startswith("after ") and ending.seconds < 60


def test_a_cell_that_takes_too_long_is_ended_kindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt comes first: what it began to write is then taken back. The shell starts nothing
    for it, and has all the time a busy machine may need; a loop, for an interrupt that comes just
    before `wait` is not always noticed.
    """
    monkeypatch.setattr(child, "_ENDING_SECONDS", 60.0)
    tidied, ready = tmp_path / "tidied", tmp_path / "ready"
    program = f"trap ': > {tidied}; exit 0' INT; : > {ready}; while :; do sleep 0.1; done"
    process = start(program, tmp_path / "x.log", timeout_s=0.5)
    while not ready.exists():
        time.sleep(0.01)
    ending = ended(process)
    assert ending.outcome == "timed out" and ending.reason.startswith("after ")
    assert tidied.exists()


def test_a_program_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "BENCH", (str(tmp_path / "no\n"),))
    with pytest.raises(ConfigError) as caught:
        launcher(timeout_s=1.0)(CELL, tmp_path / "x.log", None)
    said = str(caught.value)
    assert "a cell cannot be started (No such file or directory)" in said and said.isprintable()


def test_nothing_is_read_from_the_terminal(tmp_path: Path) -> None:
    ending = ended(start("read line || echo 'no input' >&2; exit 1", tmp_path / "x.log"))
    assert ending.reason == "exit code 1: no input"


def test_a_folder_of_the_user_s_is_never_imported_in_our_place(tmp_path: Path) -> None:
    """The working directory is no place to import from, whatever packages lie there."""
    assert (sys.executable, "-P", "-m", "tilewright.cli.main", "bench") == BENCH
    for name in ("models", "compiler", "tilewright"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('theirs')")
    done = subprocess.run([*BENCH, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: tilewright bench")


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux lets a process say of itself")
def test_the_kernel_s_first_choice(tmp_path: Path) -> None:
    """When memory is short it is a cell that is ended, never the sweep."""
    program = "cat /proc/self/oom_score_adj >&2; ulimit -d >&2; exit 1"
    log = tmp_path / "x.log"
    ended(start(program, log, max_bytes=1 << 30))
    assert log.read_text().split() == ["1000", str((1 << 30) // 1024)]
