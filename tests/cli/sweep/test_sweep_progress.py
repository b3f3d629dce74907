"""What a running sweep says, in a log and on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    hits,
    planned,
    speed_result,
)
from tilewright.cli.sweep.progress import sweep_progress
from tilewright.cli.sweep.run import say_result
from tilewright.evaluate.sweep.journal import (
    SweepJournal,
    TrialCommand,
    TrialFinished,
    TrialStarted,
)
from tilewright.evaluate.sweep.trial import Trial

LONG = "exit code 1: " + "no room [/left] in [red]" + "x" * 200


def console(*, is_terminal: bool = False) -> tuple[Console, io.StringIO]:
    """As `console.err` makes it, on a file."""
    file = io.StringIO()
    found = Console(file=file, highlight=False, markup=False, width=80, force_terminal=is_terminal)
    return found, file


def sweep(tmp_path: Path, cells: list[Trial]) -> SweepJournal:
    return SweepJournal.create(tmp_path / "sweep.jsonl", planned(), cells)


def ended(of: Trial, outcome: str, reason: str = "") -> TrialFinished:
    return TrialFinished(cell=of.id, outcome=outcome, seconds=2.0, reason=reason)  # type: ignore[arg-type]


def test_a_log_has_a_line_for_every_cell_that_has_ended(tmp_path: Path) -> None:
    right, fast, bad, slow, unwanted = cells = [
        accuracy_cell("a"),
        cell("a"),
        cell("b", round=1),
        cell("c"),
        cell("d"),
    ]
    journal = sweep(tmp_path, cells)
    to, file = console()
    with sweep_progress(to, jobs=1) as report:
        report(journal)
        for event in (
            TrialStarted(right.id, "2026-01-02T00:00:00+00:00"),
            done(right, accuracy_result(right, hits(4)), seconds=12.0),
            done(fast, speed_result(fast, [90.0, 100.0, 110.0]), seconds=3.0),
            ended(bad, "failed", LONG),
            ended(slow, "timed out", "after 900 s"),
            ended(unwanted, "cancelled", "after 1 s"),
        ):
            journal.append(event)
            for _ in range(3):  # it is told several times a second
                report(journal)
    lines = file.getvalue().splitlines()
    lefts = [line.rpartition("; ~")[2] for line in lines]
    assert [line.rpartition("; ~")[0] for line in lines] == [
        "[1/5] a performance-top-1: done in 12 s: top-1 75.0 %, KL 0.01",
        "[2/5] a performance-ci-1 round 1: done in 3 s: 100.0 t/s/u, TTFT 100 ms",
        f"[3/5] b performance-ci-1 round 2: failed in 2 s: {LONG}",
        "[4/5] c performance-ci-1 round 1: timed out in 2 s: after 900 s",
        "[5/5] d performance-ci-1 round 1: cancelled in 2 s: after 1 s",
    ]
    assert all(re.fullmatch(r"\d+ min left", left) for left in lefts)
    assert lefts[-1] == "0 min left"


def test_the_time_left_shrinks_with_what_is_left(tmp_path: Path) -> None:
    cells = [cell(str(number), round=number) for number in range(40)]
    journal = sweep(tmp_path, cells)
    to, file = console()
    with sweep_progress(to, jobs=1) as report:
        report(journal)
        for each in cells:
            journal.append(done(each, speed_result(each, [100.0]), seconds=60.0))
            report(journal)
    minutes = [int(found) for found in re.findall(r"~(\d+) min left", file.getvalue())]
    assert len(minutes) == 40
    assert minutes == sorted(minutes, reverse=True) and minutes[-1] == 0
    assert 30 <= minutes[0] <= 120, "cells of a minute each are left"


def test_what_was_there_before_is_not_said_again(tmp_path: Path) -> None:
    old, new = cell("old"), cell("new")
    journal = sweep(tmp_path, [old, new])
    journal.append(done(old, speed_result(old, [100.0])))
    to, file = console()
    with sweep_progress(to, jobs=1) as report:
        report(journal)
        assert file.getvalue() == ""
        journal.append(done(new, speed_result(new, [100.0])))
        report(journal)
        report(journal)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("[2/2] new performance-ci-1 round 1: done")


def test_a_cell_that_ran_again_is_said_again(tmp_path: Path) -> None:
    of = cell("a")
    journal = sweep(tmp_path, [of])
    to, file = console()
    with sweep_progress(to, jobs=1) as report:
        report(journal)
        for _ in range(2):
            journal.append(ended(of, "failed", "why"))
            report(journal)
            journal.append(TrialCommand(of.id, "restart"))
            report(journal)
    assert len(file.getvalue().splitlines()) == 2


def test_a_terminal_has_a_bar_and_odd_names_break_nothing(tmp_path: Path) -> None:
    of, odd = cell("a"), cell("[/odd] name")
    journal = sweep(tmp_path, [of, odd])
    to, file = console(is_terminal=True)
    with sweep_progress(to, jobs=1) as report:
        journal.append(*(TrialStarted(each.id, "2026-01-02T00:00:00+00:00") for each in (of, odd)))
        report(journal)
        journal.append(ended(of, "failed", LONG))
        report(journal)
    text = file.getvalue()
    assert "[/odd] name performance-ci-1 round 1" in text and "1/2" in text and "min left" in text
    assert LONG in text.replace("\n", "")


def test_the_end_says_what_failed_and_how_to_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fine, bad, unwanted = cells = [cell("a"), cell("b"), cell("c")]
    journal = sweep(tmp_path, cells)
    journal.append(done(fine, speed_result(fine, [100.0])), TrialCommand(unwanted.id, "cancel"))
    journal.append(ended(bad, "out of memory", LONG))
    assert say_result(journal) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"b performance-ci-1 round 1: out of memory: {LONG}"
    assert second.startswith(f"{journal.path}: 1 of 3 cells done, 1 failed, 1 cancelled; ")
    assert second.endswith(f"tilewright sweep export {journal.path}")
    journal.append(TrialCommand(bad.id, "restart"), done(bad, speed_result(bad, [1.0])))
    assert say_result(journal) == 0
    assert "2 of 3 cells done, 1 cancelled;" in capfd.readouterr().err
