"""The terminal view in 80 columns: every key, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sweep.journals import (
    PUBLISHED,
    cells,
    create,
    done,
    finish,
    start,
    twelve,
)
from tilewright.cli.main import main as cli
from tilewright.cli.sweep.main import main
from tilewright.errors import ConfigError
from tilewright.evaluate.sweep.journal import SweepJournal

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import Footer

from tests.cli.sweep.terminal import drive, go_to, names, press, screen, text, until
from tilewright.cli.sweep.show_app import LinesTable, SweepApp

NAMES = PUBLISHED


@pytest.fixture
def journal(tmp_path: Path) -> SweepJournal:
    return twelve(tmp_path / "pareto.jsonl")


def test_all_of_the_table_is_seen_in_80_columns(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        lines = screen(app)
        assert {len(line) for line in lines} == {80}
        assert lines[0].startswith("pareto.jsonl: plan pareto, not running, by plan")
        assert lines[1].startswith("37 of 48 cells done, 1 failed, 1 interrupted, 9 queued, about ")
        titles = "Configuration Done Top-1 95 % CI KL t/s/u Spr% TTFT MB Front"
        assert lines[2].split() == titles.split()
        figures = "82.0 78.5-85.1 0.0123 150.5 2.0 81.2 90 front"
        assert lines[3].split() == [NAMES[0], "4/4", *figures.split()]
        assert lines[12].split()[:3] == ["wo-bfp4-...ion-bf16", "1/4", "failed"]
        assert lines[14].split() == ["wo-bfp4-...on-mixed", "0/4", "queued"]
        assert lines[21].split() == [NAMES[0]]
        keys = "Enter log c cells s sort S reverse m markdown p front x cancel r restart q quit"
        assert lines[23].strip() == keys
        await press(pilot, "c")
        lines = screen(app)
        titles = "Cell Configuration Case Rd Status s Top-1 KL t/s/u TTFT"
        assert lines[2].split() == titles.split()
        assert lines[3].split() == [
            *(cells(NAMES[0])[0].id[:6], NAMES[0], "top-1", "done", "12.5", "82.0", "0.0123")
        ]
        assert lines[15].split()[2:] == ["ci-1", "1", "done", "12.5", "150.5", "81.2"]

    drive(journal, script)


def test_nothing_of_table_and_footer_is_cut(tmp_path: Path) -> None:
    long_names = [f"a-configuration-{60 * 'x'}-{number}" for number in range(30)]
    journal = create(tmp_path / "s.jsonl", long_names)
    for number, name in enumerate(long_names[:15]):
        figures = {"num_top1": 512 - number, "speed": 12345.6 + number, "ttft_ms": 98765.4}
        for cell in cells(name)[:3]:
            journal.append(*done(cell, **figures, resident_bytes=1_234_000_000))
        journal.append(start(cells(name)[3]))

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        def check(*, has_table: bool) -> None:
            keys = [each.region.right for each in app.screen.query_one(Footer).children]
            assert keys and max(keys) <= 80
            if has_table:
                table = app.screen.query_one(LinesTable)
                assert table.virtual_size.width <= 79  # the scroll bar takes one
                assert "interrupted" in text(app)

        check(has_table=True)
        first = names(app)[0]
        assert first.startswith("a-") and first.endswith("-0") and "..." in first
        for key in ("m", "p", "enter"):
            await press(pilot, key)
            check(has_table=False)
            await press(pilot, "escape")
        await press(pilot, "c")
        await go_to(pilot, app, 119)
        await go_to(pilot, app, 91)
        check(has_table=True)

    drive(journal, script)


def test_a_wider_screen_has_the_names_whole(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        assert NAMES[11] not in names(app)
        await pilot.resize_terminal(100, 24)
        await until(pilot, lambda: NAMES[11] in names(app))

    drive(journal, script)


def test_s_goes_through_the_columns_and_reverses(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        assert names(app)[0] == NAMES[0]
        await press(pilot, "s")
        assert "by name" in screen(app)[0] and names(app)[0] == "mlp-bf16-bf16"[:13]
        await go_to(pilot, app, 7)
        await press(pilot, "s", "s")
        assert app.screen.query_one(LinesTable).cursor_row == 0  # the best ones are in sight
        assert "by top1" in screen(app)[0] and names(app)[:2] == [NAMES[8], NAMES[7]]
        await press(pilot, "S")
        assert "by top1, reversed" in screen(app)[0] and names(app)[:2] == [NAMES[0], NAMES[1]]
        assert names(app)[-1].startswith("wo-")
        await press(pilot, "S", *("s" for _ in range(7)))
        assert "by front" in screen(app)[0]
        await press(pilot, "s")
        assert "by plan" in screen(app)[0] and names(app)[0] == NAMES[0]

    drive(journal, script)


def test_a_click_on_a_title_sorts_by_it(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        place = screen(app)[2].index("t/s/u") + 2
        await pilot.click(LinesTable, offset=(place, 0))
        await pilot.pause()
        assert "by speed" in screen(app)[0] and names(app)[:2] == [NAMES[0], NAMES[1]]
        await pilot.click(LinesTable, offset=(place, 0))
        await pilot.pause()
        assert "by speed, reversed" in screen(app)[0] and names(app)[:2] == [NAMES[8], NAMES[7]]

    drive(journal, script)


def test_a_column_that_the_other_table_has_not_is_given_up(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, *("s" for _ in range(9)))
        assert "by mb" in screen(app)[0]
        await press(pilot, "c")
        assert "by plan" in screen(app)[0]

    drive(journal, script)


def test_m_shows_the_markdown_and_w_writes_it(journal: SweepJournal) -> None:
    place = journal.path.with_name("pareto-table.md")

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, "m")
        assert "| Configuration            | Cells done | Top-1 (%) |" in text(app)
        assert not place.exists()
        await press(pilot, "w")
        written = place.read_text(encoding="utf-8")
        assert written == app.table_screen.table().markdown()
        assert written.count("\n|") == 13 and "out of luck" in written
        assert "written to " in text(app)
        await press(pilot, "escape")
        assert app.screen is app.table_screen

    drive(journal, script)
    assert sorted(each.name for each in journal.path.parent.iterdir()) == [
        "pareto-table.md",
        "pareto.jsonl",
    ]


def test_what_cannot_be_written_is_said(journal: SweepJournal) -> None:
    journal.path.with_name("pareto-table.md").mkdir()

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, "m", "w")
        assert "pareto-table.md: Is a directory" in text(app)

    drive(journal, script, size=(200, 24))


def test_p_shows_the_front_and_its_notes(tmp_path: Path) -> None:
    journal = create(tmp_path / "s.jsonl", NAMES[:3])
    finish(journal, NAMES[0], num_top1=500, speed=80.0)
    finish(journal, NAMES[1], num_top1=499, speed=120.0)
    finish(journal, NAMES[2], num_top1=100, speed=70.0)

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, "p")
        lines = screen(app)
        assert lines[0].startswith("The front")
        assert lines[3].split()[0] == NAMES[1] and lines[4].split()[0] == NAMES[0]
        assert NAMES[2] not in text(app)
        note = " ".join(text(app).split())
        assert f"{NAMES[0]}: its top-1 is not distinguishable from {NAMES[1]}'s" in note
        await press(pilot, "q")
        assert app.screen is app.table_screen

    drive(journal, script)


def test_names_are_no_markup(tmp_path: Path) -> None:
    journal = create(tmp_path / "[b]s.jsonl", ["[red]x[/red]", "[/]"])

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        assert screen(app)[0].startswith("[b]s.jsonl")
        assert names(app) == ["[red]x[/red]", "[/]"]
        assert screen(app)[21].startswith("[red]x[/red]")
        await press(pilot, "x")
        assert "Cancel 4 cells of [red]x[/red]?" in text(app)
        await press(pilot, "n", "enter")
        assert screen(app)[0].startswith("The log of [red]x[/red]")

    drive(journal, script)


def test_an_empty_sweep_has_nothing_to_do(tmp_path: Path) -> None:
    journal = create(tmp_path / "s.jsonl", [])
    before = journal.path.read_bytes()

    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        assert "0 of 0 cells done" in screen(app)[1] and "finished" in screen(app)[0]
        await press(pilot, "x", "r", "enter", "down", "c", "s", "S", "x", "enter")
        assert app.screen is app.table_screen
        await press(pilot, "p")
        assert "no configuration has both a top-1 and a speed yet" in text(app)
        await press(pilot, "escape", "m", "escape")
        assert app.screen is app.table_screen

    drive(journal, script)
    assert journal.path.read_bytes() == before


def test_escape_goes_back_and_never_quits(journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        await press(pilot, "c")
        assert app.table_screen.shows_cells
        await press(pilot, "escape")
        assert not app.table_screen.shows_cells
        await press(pilot, "escape", "p", "escape", "escape", "escape")
        assert not app._exit and app.screen is app.table_screen

    drive(journal, script)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_keys_that_quit(key: str, journal: SweepJournal) -> None:
    async def script(pilot: Pilot[None], app: SweepApp) -> None:
        assert not app._exit
        await press(pilot, key)
        assert app._exit

    assert drive(journal, script).return_code == 0


def refuse(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        main(["show", *argv])
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Terminal:
    """A standard stream that says it is one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by the test itself: pytest sets the streams anew after the fixtures."""
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Terminal(getattr(sys, name)))


def test_without_a_terminal_it_points_to_status(journal: SweepJournal) -> None:
    status = f"tilewright sweep status {journal.path}"
    assert refuse(str(journal.path)).endswith(f"allowed: a terminal, or {status}")


def test_without_the_library_it_says_what_to_install(
    journal: SweepJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    for name in [each for each in sys.modules if each.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tilewright.cli.sweep.show_app")
    monkeypatch.setitem(sys.modules, "textual", None)
    message = "sweep show needs textual; allowed: pip install -e '.[show]' in the clone"
    assert refuse(str(journal.path)) == message


def test_the_command_runs_the_view_and_gives_its_code(
    journal: SweepJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    seen: list[Path] = []

    def run(app: SweepApp) -> None:
        seen.append(app.table_screen.journal.path)
        app.exit(return_code=3)

    monkeypatch.setattr(SweepApp, "run", run)
    assert cli(["sweep", "show", str(journal.path)]) == 3
    assert seen == [journal.path]


def test_what_is_no_sweep_is_refused_before_all_else(tmp_path: Path) -> None:
    assert "No such file" in refuse(str(tmp_path / "none.jsonl"))
    other = tmp_path / "x.jsonl"
    other.write_text("[]\n")
    assert "no event of a sweep" in refuse(str(other))
    assert "required: FILE" in refuse()
