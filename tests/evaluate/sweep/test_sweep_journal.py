"""A sweep's file: events in, state out; torn lines, other writers, malformed lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_cells import accuracy_cell, cell, done, failed, planned, speed_result
from tilewright.errors import ConfigError
from tilewright.evaluate.sweep.journal import (
    Added,
    SweepJournal,
    SweepState,
    TrialCommand,
    TrialFinished,
    TrialStarted,
)
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.json_lines import TornLineWarning

A, B = cell("a"), cell("b")
TIME = "2026-01-02T03:04:05+00:00"


def make(path: Path, *cells: Trial) -> SweepJournal:
    return SweepJournal.create(path / "sweep.jsonl", planned(), cells or (A, B))


def test_a_sweep_reads_back_as_it_was_written(tmp_path: Path) -> None:
    journal = make(tmp_path)
    journal.append(TrialStarted(A.id, TIME), done(A, speed_result(A, [100.0]), 2.5))
    found = SweepJournal.open(journal.path).state
    assert found.planned == planned()
    assert [state.cell for state in found.cells.values()] == [A, B]
    assert found.cells[A.id].status == "done" and found.cells[A.id].seconds == 2.5
    assert found.cells[A.id].result == speed_result(A, [100.0])
    assert [state.cell for state in found.open_cells()] == [B]
    assert found.count("done", "queued") == 2


def test_a_cell_is_named_by_what_its_figures_depend_on() -> None:
    other = cell("other name", precision_id="id-a", heading="x", weight_bytes=1, is_kept=False)
    assert other.id == A.id
    differing = [B, cell("a", round=1), cell("a", threads=2), cell("a", case="performance-ci-32")]
    differing += [accuracy_cell("a"), accuracy_cell("a", text="held-out"), cell("a", target="null")]
    assert len({each.id for each in [A, *differing]}) == 1 + len(differing)


def test_arguments_name_everything_a_run_needs() -> None:
    plain = A.arguments()
    assert plain[:2] == ["--model", "smollm2"] and "--threads" not in plain
    assert {"--json", "--no-results"} <= set(plain) and "--no-cache" not in plain
    held = accuracy_cell("a", text="held-out", is_kept=False).arguments(threads=1)
    assert held[held.index("--accuracy-text") + 1] == "held-out"
    assert held[held.index("--threads") + 1] == "1" and "--no-cache" in held
    assert cell("a", threads=2).arguments(threads=1)[-1] == "2"


def test_a_started_cell_without_an_end_is_open_again(tmp_path: Path) -> None:
    journal = make(tmp_path)
    journal.append(TrialStarted(A.id, TIME))
    assert SweepJournal.open(journal.path).state.cells[A.id].is_open


def test_cancel_and_restart(tmp_path: Path) -> None:
    journal = make(tmp_path)
    journal.append(TrialCommand(A.id, "cancel"))
    assert journal.state.cells[A.id].status == "cancelled"
    journal.append(TrialCommand(A.id, "restart"))
    assert journal.state.cells[A.id].status == "queued"
    journal.append(TrialStarted(A.id, TIME), TrialCommand(A.id, "cancel"))
    assert journal.state.cells[A.id].is_cancel_requested
    journal.append(done(A, speed_result(A, [1.0])), TrialCommand(A.id, "cancel"))
    assert journal.state.cells[A.id].status == "done", "what is finished is not cancelled"
    journal.append(TrialCommand(A.id, "restart"))
    assert journal.state.cells[A.id].is_open and journal.state.cells[A.id].result is None


def test_another_process_is_seen(tmp_path: Path) -> None:
    ours = make(tmp_path)
    theirs = SweepJournal.open(ours.path)
    theirs.append(TrialCommand(B.id, "cancel"))
    assert ours.state.cells[B.id].status == "queued"
    ours.refresh()
    assert ours.state.cells[B.id].status == "cancelled"


def test_one_process_runs_a_sweep(tmp_path: Path) -> None:
    journal = make(tmp_path)
    other = SweepJournal.open(journal.path)
    assert not other.has_runner()
    with journal.hold():
        assert other.has_runner()
        with pytest.raises(ConfigError, match="another process is running"), other.hold():
            pass
    with other.hold():
        pass


def test_a_torn_line_is_dropped_and_reported_and_cut_off(tmp_path: Path) -> None:
    journal = make(tmp_path)
    journal.append(done(A, speed_result(A, [5.0])))
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"event":"finished","cell":"')
    with pytest.warns(TornLineWarning, match="dropped a last line"):
        found = SweepJournal.open(journal.path)
    assert found.state.cells[A.id].status == "done" and found.state.cells[B.id].status == "queued"
    with pytest.warns(TornLineWarning):
        found.append(failed(B))
    assert journal.path.read_bytes().startswith(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SweepJournal.open(journal.path).state.cells[B.id].status == "failed"


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_any_cut_of_the_last_line_is_survived(tmp_path: Path, cut: int) -> None:
    journal = make(tmp_path)
    journal.append(done(A, speed_result(A, [5.0])))
    os.truncate(journal.path, journal.path.stat().st_size - cut)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        found = SweepJournal.open(journal.path)
    # a cut of the newline alone leaves a line that is whole
    assert found.state.cells[A.id].is_open is (cut > 1)


def test_a_killed_writer_loses_nothing_that_it_said_was_written(tmp_path: Path) -> None:
    journal = make(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tilewright.evaluate.sweep.journal import *\n"
        "journal = SweepJournal.open(Path(sys.argv[1]))\n"
        "while True:\n"
        "    journal.append(TrialStarted(sys.argv[2], 'now')); print('.', flush=True)\n"
    )
    arguments = [sys.executable, "-c", code, str(journal.path), A.id]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as child:
        assert child.stdout is not None
        said = sum(1 for _ in zip(range(5), child.stdout, strict=False))
        child.send_signal(signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        found = SweepJournal.open(journal.path)
    assert said == 5 and found.state.cells[A.id].status == "running"
    assert journal.path.read_bytes().count(b'"started"') >= said


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[]", "no event"),
        ("{}", "no event"),
        ('{"event":"finished"}', "no event"),
        ('{"event":"unheard of"}', "no event"),
        ('{"event":"started","cell":"no such","timestamp":"x"}', "was not added"),
        ('{"event":"asked","cell":"CELL","what":"explode"}', "no event"),
        ('{"event":"asked","cell":"CELL","what":"cancel","why":1}', "no event"),
        ('{"event":"finished","cell":"CELL","outcome":"done","seconds":1}', "does not fit"),
        (
            '{"event":"finished","cell":"CELL","outcome":"done","seconds":1,"result":{"a":1}}',
            "schema",
        ),
        ("[" * 100_000, "no event"),
        ("\xff", "no event"),
    ],
)
def test_malformed_lines_are_refused_by_place(tmp_path: Path, line: str, complaint: str) -> None:
    journal = make(tmp_path)
    with journal.path.open("a", encoding="latin-1") as file:
        file.write(line.replace("CELL", A.id) + "\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        SweepJournal.open(journal.path)
    assert f"{journal.path}:4" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_sweep_are_refused(tmp_path: Path) -> None:
    for name, text in [("empty", ""), ("other", '{"a": 1}\n'), ("version", version_line(99))]:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError, match="sweep"):
            SweepJournal.open(path)
    with pytest.raises(ConfigError, match="No such file"):
        SweepJournal.open(tmp_path / "missing")
    with pytest.raises(ConfigError, match="sweep"):
        SweepJournal.open(tmp_path)


def version_line(version: int) -> str:
    header = {"event": "planned", "version": version, "plan": "grid", "options": {}, "base": None}
    header |= {"timestamp": TIME, "commit": None, "versions": {}}
    return json.dumps(header) + "\n"


def test_a_second_sweep_does_not_overwrite_the_first(tmp_path: Path) -> None:
    journal = make(tmp_path)
    with pytest.raises(ConfigError, match="--resume"):
        SweepJournal.create(journal.path, planned(), [A])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from(["start", "done", "failed", "cancel", "restart", "add"]),
        ),
        max_size=12,
    )
)
def test_state_follows_from_any_order_of_events(steps: list[tuple[Trial, str]]) -> None:
    """Finished cells stay so until somebody asks for a restart; nothing is ever lost."""
    state = SweepState(planned())
    for each in (A, B):
        state.apply(Added(each))
    last: dict[str, str] = {}
    for of, what in steps:
        if what == "add":
            state.apply(Added(of))
        elif what == "start":
            state.apply(TrialStarted(of.id, TIME))
            last[of.id] = "running"
        elif what in ("cancel", "restart"):
            state.apply(TrialCommand(of.id, what))  # type: ignore[arg-type]
            if what == "cancel" and last.get(of.id, "queued") == "queued":
                last[of.id] = "cancelled"
            elif what == "restart" and last.get(of.id, "queued") not in ("queued", "running"):
                last[of.id] = "queued"
        else:
            event = done(of, speed_result(of, [1.0])) if what == "done" else failed(of)
            state.apply(event)
            last[of.id] = what
        assert {key: each.status for key, each in state.cells.items()} == {
            each.id: last.get(each.id, "queued") for each in (A, B)
        }
    assert all(
        (each.status == "done") is (each.result is not None) for each in state.cells.values()
    )


def test_an_outcome_that_is_none_is_refused(tmp_path: Path) -> None:
    journal = make(tmp_path)
    with pytest.raises(ConfigError, match="does not fit"):
        journal.append(
            TrialFinished(
                cell=A.id, outcome="failed", seconds=1.0, result=speed_result(A, [1]).to_dict()
            )
        )
