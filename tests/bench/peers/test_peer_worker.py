"""A worker process: what it answers, and one line for every way in which it can fail."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peers import worker as worker_module
from bench.peers.worker import Generated, Loaded, Worker, WorkerError, serve

ROOT = Path(__file__).resolve().parents[3]

STUB = """
import os, signal, sys, time
from bench.peers.worker import Generated, Loaded, serve, take_standard_output

class Stub:
    def loaded(self):
        print("a library that prints")
        return Loaded(100, 80)
    def generate(self, tokens, num_tokens):
        {body}
        return Generated(tuple(range(num_tokens)), tuple(0.5 * (i + 1) for i in range(num_tokens)))

answers = take_standard_output()
{before}
sys.exit(serve(Stub, sys.stdin, answers))
"""


@contextmanager
def stub(
    tmp_path: Path, body: str = "pass", before: str = "", timeout_s: float = 60.0
) -> Iterator[Worker]:
    path = tmp_path / "stub.py"
    path.write_text(STUB.format(body=body, before=before))
    worker = Worker(
        [sys.executable, str(path)], environment={"PYTHONPATH": str(ROOT)}, timeout_s=timeout_s
    )
    try:
        yield worker
    finally:
        worker.close()


def test_it_loads_once_and_answers_each_time(tmp_path: Path) -> None:
    with stub(tmp_path) as worker:
        assert worker.loaded() == Loaded(100, 80)
        for _ in range(2):
            assert worker.generate([7, 8], 3) == Generated((0, 1, 2), (0.5, 1.0, 1.5))
    assert worker.close().code == 0, "it ends when its input does"


@pytest.mark.parametrize(
    "body, reason",
    [
        ("raise ValueError('two\\n  lines')", "ValueError: two lines"),
        ("sys.stderr.write('out of luck\\n\\n'); sys.stderr.flush(); os._exit(3)", "out of luck"),
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("answers.write('nonsense\\n')", "none"),
        ("answers.write('[]\\n')", "none"),
        ("answers.write('{}\\n')", "none"),
        ('answers.write(\'{"tokens": [1], "times": ["x"]}\\n\')', "none"),
        ('answers.write(\'{"tokens": [1], "times": [0.1]}\\n\')', "none"),
    ],
)
def test_a_failure_is_one_line(tmp_path: Path, body: str, reason: str) -> None:
    with stub(tmp_path, body) as worker:
        worker.loaded()
        with pytest.raises(WorkerError) as failure:
            worker.generate([7], 2)
    assert reason in str(failure.value)
    assert "\n" not in str(failure.value)


def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    with stub(tmp_path, "time.sleep(600)") as worker:
        worker.loaded()
        worker._timeout_s = 0.3  # from here on: a busy machine starts it in its own time
        started = time.monotonic()
        with pytest.raises(WorkerError, match=r"no answer within 0\.3 s"):
            worker.generate([7], 2)
        assert time.monotonic() - started < 30
    assert worker.close().code != 0


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with stub(tmp_path, before="import no_such_library") as worker:
        with pytest.raises(WorkerError, match="No module named 'no_such_library'"):
            worker.loaded()
        with pytest.raises(WorkerError):
            worker.generate([7], 2)


def test_an_engine_that_cannot_be_opened_is_an_answer() -> None:
    def open_engine() -> None:
        raise RuntimeError("no such file")

    answers = io.StringIO()
    assert serve(open_engine, io.StringIO(), answers) == 1  # type: ignore[arg-type]
    assert json.loads(answers.getvalue()) == {"error": "RuntimeError: no such file"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_settling_waits_until_no_thread_has_computed_for_three_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its threads compute is counted; a thread that spins after its work is waited for."""
    spin = "end = time.process_time() + 0.1\n        while time.process_time() < end: pass"
    with stub(tmp_path, body=spin) as worker:
        worker.loaded()
        before = worker._ticks()
        worker.generate([7], 1)
        assert 8 <= worker._ticks() - before < 50, "hundredths of a second"
        ticks = [5, 9, 9, 12, 12, 12, 12, 13]
        monkeypatch.setattr(worker_module, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(worker, "_ticks", lambda: ticks.pop(0))
        worker.settle()
        assert ticks == [13], "idle by now"
