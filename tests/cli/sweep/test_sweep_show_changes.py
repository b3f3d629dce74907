"""The terminal view while the sweep's file changes: by keys, by other processes, for the worse."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cli.sweep.journals import (
    PUBLISHED,
    cells,
    done,
    finish,
    start,
    twelve,
)
from tilewright.evaluate.sweep.journal import Added, SweepJournal, TrialCommand, TrialFinished

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import Static

from tests.cli.sweep.terminal import drive, go_to, line_of, names, press, screen, text, until
from tilewright.cli.sweep.show_app import SweepApp

NAMES = PUBLISHED


@pytest.fixture
def journal(tmp_path: Path) -> SweepJournal:
    return twelve(tmp_path / "pareto.jsonl")


def test_x_cancels_after_a_yes(journal: SweepJournal) -> None:
    before = journal.path.read_bytes()

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await go_to(pilot, app, 11)
        await press(pilot, "x")
        assert f"Cancel 4 cells of {NAMES[11]}?" in text(app) and "y: yes   n: no" in text(app)
        for key in ("n", "escape", "q"):
            await press(pilot, key)
            assert app.screen is app.table_screen and journal.path.read_bytes() == before
            await press(pilot, "x")
        await press(pilot, "y")
        assert "requested: cancel 4 cells" in screen(app)[22]
        assert "0/4 cancelled" in line_of(app, "wo-bfp4...-mixed")
        await press(pilot, "x")
        assert "nothing to cancel: 4 cells ended, or cancelled, already" in screen(app)[22]

    drive(journal, script)
    added = journal.path.read_bytes().removeprefix(before).splitlines()
    assert len(added) == 4 and all(b'"what":"cancel"' in line for line in added)
    state = SweepJournal.open(journal.path).state
    assert {state.cells[cell.id].status for cell in cells(NAMES[11])} == {"cancelled"}


def test_r_restarts_after_a_yes_and_says_what_is_lost(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await go_to(pilot, app, 9)
        await press(pilot, "r")
        question = str(app.screen.query_one("#question", Static).content)
        assert f"Restart 2 cells of {NAMES[9]}? The figures of 1 will be replaced." in question
        await press(pilot, "y")
        assert (
            "requested: restart 2 cells; the next run of the sweep takes them up" in screen(app)[22]
        )
        assert "0/4 interrupted" in line_of(app, "wo-")

    drive(journal, script)
    state = SweepJournal.open(journal.path).state
    statuses = [state.cells[cell.id].status for cell in cells(NAMES[9])]
    assert statuses == ["queued", "queued", "running", "queued"]


def test_x_on_a_cell_that_runs(journal: SweepJournal) -> None:
    running = cells(NAMES[9])[2]

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        with SweepJournal.open(journal.path).hold():
            await until(pilot, lambda: "plan pareto, running" in screen(app)[0])
            await press(pilot, "c", "s", "s", "s", "s", "s")
            assert "by status" in screen(app)[0]
            row = next(
                i for i, each in enumerate(app.table_screen.table().lines) if each.key == running.id
            )
            await go_to(pilot, app, row)
            assert running.id in screen(app)[21]
            await press(pilot, "x", "y")
            assert "the running sweep stops it" in screen(app)[22]
            assert running.id in screen(app)[21] and "stopping" in text(app)
        await until(pilot, lambda: "not running" in screen(app)[0])

    drive(journal, script)


def test_what_another_process_appends_is_shown(journal: SweepJournal) -> None:
    other = SweepJournal.open(journal.path)

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, "down", "down")
        finish(other, NAMES[10], num_top1=510, speed=999.0)
        await until(pilot, lambda: "999.0" in text(app))
        assert screen(app)[21].split() == [NAMES[2]]  # the cursor stays on its line
        assert "41 of 48" in screen(app)[1]
        other.append(*map(Added, cells("new-one")))
        await until(pilot, lambda: "41 of 52" in screen(app)[1] and "new-one" in text(app))
        await press(pilot, "m")
        finish(other, "new-one", num_top1=1, speed=777.0)
        await until(pilot, lambda: "| new-one                  | 4/4 " in text(app))

    drive(journal, script)


def test_a_line_that_is_being_written_is_waited_for(journal: SweepJournal) -> None:
    cell = cells(NAMES[11])[0]
    values = next(each for each in done(cell, num_top1=256) if isinstance(each, TrialFinished))
    line = msgspec.json.encode(values)

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        with journal.path.open("ab") as file:
            file.write(line[:50])
            file.flush()
            await pilot.pause(0.15)
            assert not screen(app)[22].strip() and "0/4 queued" in screen(app)[14]
            file.write(line[50:] + b"\n")
            file.flush()
        await until(pilot, lambda: "1/4 queued" in screen(app)[14])
        assert not screen(app)[22].strip()

    drive(journal, script)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"no event\n", "no event of a sweep"),
        (b'{"event":"asked","cell":"ffff","what":"cancel"}\n', "of a cell that was not added"),
        (b"\xff\x00\n", "no event of a sweep"),
    ],
)
def test_a_malformed_line_is_said_and_the_view_stays(
    line: bytes, said: str, journal: SweepJournal
) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        with journal.path.open("ab") as file:
            file.write(line)
        await until(pilot, lambda: said in text(app))
        assert "37 of 48" in screen(app)[1] and names(app)[0] == NAMES[0]
        await press(pilot, "down", "c", "s", "m", "escape", "enter", "escape")
        await press(pilot, "c", "x", "y")
        assert app.is_running and said in text(app)

    drive(journal, script, size=(250, 24))


def test_a_file_that_goes_away_is_said(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        journal.path.unlink()
        await until(pilot, lambda: "No such file" in text(app))
        journal.path.mkdir()
        await press(pilot, "r", "y")
        await until(pilot, lambda: "Is a directory" in text(app))
        assert names(app)[0] == NAMES[0]

    drive(journal, script, size=(250, 24))


def test_an_asked_cell_of_a_finished_sweep_is_queued_again(journal: SweepJournal) -> None:
    cell = cells(NAMES[0])[0]

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        SweepJournal.open(journal.path).append(TrialCommand(cell.id, "restart"))
        await until(pilot, lambda: "3/4 queued" in screen(app)[3])
        assert "150.5" in screen(app)[3] and "82.0" not in screen(app)[3]

    drive(journal, script)


def test_enter_shows_the_log_of_the_newest_cell_as_it_grows(journal: SweepJournal) -> None:
    running = cells(NAMES[9])[2]
    journal.append(start(running, 30))
    journal.log_path("any").parent.mkdir()
    place = journal.log_path(running.id)
    place.write_bytes(b"\x1b[32mgreen\x1b[0m [bold]as it is[/bold]\n")

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await go_to(pilot, app, 9)
        await press(pilot, "enter")
        lines = screen(app)
        assert lines[0].startswith(f"The log of {NAMES[9]}")
        assert lines[1].startswith(f"{running.id} {NAMES[9]} performance-ci-1 round 2")
        assert lines[2].startswith("interrupted") and "green [bold]as it is[/bold]" in lines[4]
        with place.open("a") as file:
            file.writelines(f"line {number}\n" for number in range(100))
        await until(pilot, lambda: "line 99" in text(app))
        await press(pilot, "escape", "up", "enter")
        assert "no log: there is no " in text(app)

    drive(journal, script)
