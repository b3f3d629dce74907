"""Running cells: order, side by side, crashes, hangs, memory, cancelling, interrupts, resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweep_cells import accuracy_cell, cell, planned, speed_result
from tilewright.errors import ConfigError
from tilewright.evaluate.results.result_file import dumps
from tilewright.evaluate.sweep.journal import SweepJournal, TrialCommand
from tilewright.evaluate.sweep.runner import Launch, Runner
from tilewright.evaluate.sweep.runner import launcher as plain_launcher
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.child_process import Child

ROOT = Path(__file__).resolve().parents[3]
Script = Callable[[Trial], str]


def launcher(script: Script, *, timeout_s: float = 60.0, max_bytes: int | None = None) -> Launch:
    """Starts a Python program instead of the demo."""

    def launch(of: Trial, log: Path, threads: int | None) -> Child:
        command = (sys.executable, "-S", "-c", script(of))
        return Child(command, log=log, timeout_s=timeout_s, max_bytes=max_bytes)

    return launch


def good(of: Trial) -> str:
    """A program that prints the result of a cell."""
    return f"print({dumps(speed_result(of, [100.0]))!r})"


def run(
    tmp_path: Path, cells: list[Trial], script: Script, *, jobs: int = 1, **options: object
) -> SweepJournal:
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), cells)
    launch = launcher(script, **options)  # type: ignore[arg-type]
    Runner(journal, launch, jobs=jobs).run()
    return journal


def test_cells_run_in_order_and_are_recorded(tmp_path: Path) -> None:
    cells = [cell("a"), cell("b"), cell("a", round=1)]
    order = tmp_path / "order"

    def script(of: Trial) -> str:
        return f"open({str(order)!r}, 'a').write('{of.id} '); {good(of)}"

    journal = run(tmp_path, cells, script)
    assert order.read_text().split() == [each.id for each in cells]
    assert journal.state.count("done") == 3
    assert journal.state.cells[cells[0].id].result == speed_result(cells[0], [100.0])


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import os; os.abort()", "failed", "killed by SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "failed", "killed by SIGSEGV"),
        ("import sys; sys.exit('tilewright: no such model')", "failed", "no such model"),
        ("raise MemoryError", "out of memory", "MemoryError"),
        ("print('no result')", "failed", "exit code 0"),
        ("print('{}')", "failed", "schema"),
        ("pass", "failed", "said nothing"),
        ("print('\\x1b[31m', file=__import__('sys').stderr); 1 / 0", "failed", "ZeroDivisionError"),
    ],
)
def test_a_failure_is_recorded_and_the_sweep_goes_on(
    tmp_path: Path, program: str, status: str, reason: str
) -> None:
    bad, fine = cell("bad"), cell("fine")
    journal = run(tmp_path, [bad, fine], lambda of: program if of == bad else good(of))
    found = journal.state.cells[bad.id]
    assert found.status == status and reason in found.reason
    assert found.reason.isprintable() and found.seconds is not None
    assert journal.state.cells[fine.id].status == "done"
    assert SweepJournal.open(journal.path).state.cells[bad.id].status == status


def test_a_hanging_cell_is_ended_with_its_children(tmp_path: Path) -> None:
    hangs, fine = cell("hangs"), cell("fine")
    child = tmp_path / "child"
    shell = f"trap '' INT; sleep 600 & echo $! > '{child}'; wait"
    program = f"import os; os.execvp('sh', ['sh', '-c', {shell!r}])"
    impatient, patient = launcher(lambda of: program, timeout_s=1.5), launcher(good)

    def launch(of: Trial, log: Path, threads: int | None) -> Child:
        return (impatient if of == hangs else patient)(of, log, threads)

    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), [hangs, fine])
    Runner(journal, launch).run()
    assert journal.state.cells[hangs.id].status == "timed out"
    assert journal.state.cells[fine.id].status == "done"
    assert is_gone(int(child.read_text()))


def is_gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has asked for."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on data that holds")
def test_a_cell_that_wants_too_much_memory_fails_alone(tmp_path: Path) -> None:
    greedy, fine = cell("greedy"), cell("fine")
    journal = run(
        tmp_path,
        [greedy, fine],
        lambda of: "x = bytearray(4 << 30)" if of == greedy else good(of),
        max_bytes=1 << 30,
    )
    assert journal.state.cells[greedy.id].status == "out of memory"
    assert journal.state.cells[fine.id].status == "done"


def test_accuracy_cells_run_side_by_side_and_speed_cells_alone(tmp_path: Path) -> None:
    """One of accuracy waits for the other; one of speed gives another time to begin beside it."""
    cells = [accuracy_cell("a"), accuracy_cell("b"), cell("a"), cell("b")]
    log = tmp_path / "log"

    def script(of: Trial) -> str:
        begin = f"log = open({str(log)!r}, 'a'); log.write('+{of.kind[0]}'); log.flush()"
        together = f"\nwhile '+a+a' not in open({str(log)!r}).read(): time.sleep(0.01)\n"
        stay = together if of.kind == "accuracy" else "; time.sleep(0.2); "
        return f"import time; {begin}{stay}log.write('-{of.kind[0]}'); {good(of)}"

    run(tmp_path, cells, script, jobs=2)
    assert log.read_text() == "+a+a-a-a+s-s+s-s"


def test_threads_are_shared_out_between_cells_side_by_side(tmp_path: Path) -> None:
    seen: dict[str, int | None] = {}
    plain = launcher(good)

    def launch(of: Trial, log: Path, threads: int | None) -> Child:
        seen[of.kind] = threads
        return plain(of, log, threads)

    for jobs, expected in ((1, None), (10_000, 1)):
        path = tmp_path / str(jobs) / "sweep.jsonl"
        journal = SweepJournal.create(path, planned(), [accuracy_cell("a"), cell("a")])
        Runner(journal, launch, jobs=jobs).run()
        assert seen == {"accuracy": expected, "speed": None}


def test_a_running_cell_is_cancelled_and_restarted_from_elsewhere(tmp_path: Path) -> None:
    first, second = cell("first"), cell("second")
    started = tmp_path / "started"
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), [first, second])

    def script(of: Trial) -> str:
        if of == first and not started.exists():
            return f"import time; open({str(started)!r}, 'w'); time.sleep(600)"
        return good(of)

    def cancel() -> None:
        while not started.exists():
            time.sleep(0.02)
        other = SweepJournal.open(journal.path)
        other.append(TrialCommand(first.id, "cancel"))
        while other.state.cells[first.id].status != "cancelled":
            time.sleep(0.02)
            other.refresh()
        other.append(TrialCommand(first.id, "restart"))

    thread = threading.Thread(target=cancel)
    thread.start()
    Runner(journal, launcher(script)).run()
    thread.join()
    if journal.state.cells[first.id].is_open:  # the restart came after the last cell had ended
        Runner(journal, launcher(script)).run()
    assert journal.state.count("done") == 2
    assert b'"cancelled"' in journal.path.read_bytes()


def test_measure_runs_what_is_new_and_never_repeats(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def script(of: Trial) -> str:
        return f"open({str(runs)!r}, 'a').write('.'); {good(of)}"

    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), [])
    for _ in range(2):
        runner = Runner(journal, launcher(script))
        states = runner.measure([cell("a"), cell("b")])
        assert [state.status for state in states] == ["done", "done"]
        journal = SweepJournal.open(journal.path)
    assert runs.read_text() == ".."


_RESUMED = """
import sys
from pathlib import Path
from tilewright.utils.child_process import Child
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.evaluate.sweep.runner import Runner
journal = SweepJournal.open(Path(sys.argv[1]))
def launch(of, log, threads):
    program = open(sys.argv[2]).read().replace("CELL", of.id)
    return Child((sys.executable, "-S", "-c", program), log=log, timeout_s=60)
with journal.hold():
    Runner(journal, launch).run()
"""


def test_kill_9_and_resume_neither_lose_nor_repeat_a_finished_cell(tmp_path: Path) -> None:
    cells = [cell(name) for name in "abcd"]
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), cells)
    runs, program, ends = tmp_path / "runs", tmp_path / "program", tmp_path / "ends"
    lines = {each.id: dumps(speed_result(each, [1.0])) for each in cells}
    program.write_text(
        "import os, time\n"
        f"with open({str(runs)!r}, 'a') as runs: runs.write('CELL ')\n"
        f"while 'CELL' == {cells[2].id!r} and not os.path.exists({str(ends)!r}): time.sleep(0.01)\n"
        f"print({lines!r}['CELL'])"
    )
    arguments = [sys.executable, "-c", _RESUMED, str(journal.path), str(program)]
    child = subprocess.Popen(arguments, cwd=ROOT)
    while not runs.exists() or len(runs.read_text().split()) < 3:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    journal = SweepJournal.open(journal.path)
    finished = [key for key, state in journal.state.cells.items() if state.status == "done"]
    assert len(finished) == 2
    ends.touch()
    subprocess.run(arguments, cwd=ROOT, check=True)
    journal.refresh()
    assert journal.state.count("done") == 4
    started = runs.read_text().split()
    assert all(started.count(each) == 1 for each in finished), "a finished cell ran again"
    assert len(started) == 5, "only the cell that was cut short ran twice"


def test_a_cell_dies_with_its_sweep(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = tmp_path / "program"
    program.write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), [cell("a")])
    arguments = [sys.executable, "-c", _RESUMED, str(journal.path), str(program)]
    child = subprocess.Popen(arguments, cwd=ROOT)
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert is_gone(int(pid_file.read_text()))


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be started"):
        plain_launcher(timeout_s=1.0)(cell(), blocked / "x.log", None)
