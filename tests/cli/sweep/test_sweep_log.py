"""What ``tilewright sweep log`` prints of a cell, whatever its log holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.sweep.journals import FOUR, cells, four, start
from tilewright.cli.sweep import control
from tilewright.cli.sweep.main import main
from tilewright.evaluate.sweep.journal import SweepJournal, TrialCommand


@pytest.fixture
def journal(tmp_path: Path) -> SweepJournal:
    return four(tmp_path / "pareto.jsonl")


def log(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["log", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def write_log(journal: SweepJournal, cell_id: str, text: bytes) -> None:
    journal.log_path("any").parent.mkdir(exist_ok=True)
    journal.log_path(cell_id).write_bytes(text)


def test_the_log_of_a_cell(journal: SweepJournal, capsys: pytest.CaptureFixture[str]) -> None:
    cell = cells(FOUR[2])[2]
    said = b"compile  10 %\rcompile 100 %\n\x1b[31mTraceback\x1b[0m: \x07broken\xff\n"
    write_log(journal, cell.id, said)
    text = log(capsys, journal.path, cell.id[:9])
    assert text.splitlines() == [
        f"{cell.id} {FOUR[2]} performance-ci-1 round 2",
        "failed after 3.2 s: exit code 7 red",
        "",
        "compile 100 %",
        "Traceback: broken\ufffd",
    ]


def test_the_log_of_a_configuration_is_that_of_its_newest_cell(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = cells(FOUR[2])[1]
    journal.append(TrialCommand(newest.id, "restart"), start(newest, 5))
    write_log(journal, newest.id, b"here it is\n")
    with journal.hold():
        text = log(capsys, journal.path, FOUR[2])
    assert text.startswith(newest.id) and text.endswith("here it is\n")
    assert "running since 2026-01-01T00:05:00" in text


def test_logs_that_are_missing_empty_or_no_files(
    journal: SweepJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = cells(FOUR[3])[0]
    text = log(capsys, journal.path, cell.id)
    place = journal.log_path(cell.id)
    assert text.splitlines()[1:] == ["queued", "", f"no log: there is no {place}"]
    write_log(journal, cell.id, b"")
    assert "(the log is empty)" in log(capsys, journal.path, cell.id)
    place.unlink()
    place.mkdir()
    assert f"no log: {place}: " in log(capsys, journal.path, cell.id)


def test_of_a_long_log_the_end_is_shown(journal: SweepJournal) -> None:
    state = journal.state.cells[cells(FOUR[0])[0].id]
    write_log(journal, state.cell.id, b"first\n" + 1000 * b"x" + b"\nlast\n")
    text = control.log_text(journal, state, has_runner=False, max_bytes=100)
    assert "(the last 100 of 1012 bytes of " in text
    assert text.endswith("x\nlast") and "first" not in text
