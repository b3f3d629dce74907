"""How far a batch is: rows, those of an earlier run too, rates, time; a bar, or lines of a log."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tests.batch.rows import record
from tilewright.batch.engine import FinishedRequest
from tilewright.cli.terminal import batch_progress, periodic_status_line
from tilewright.cli.terminal.batch_progress import Bar
from tilewright.cli.terminal.periodic_status_line import PeriodicStatusLine


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(batch_progress, "_SHOW_SECONDS", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    monkeypatch.setattr(batch_progress, "err", lambda: console)
    data: Any = SimpleNamespace(length=lambda row: 10 * row)
    with Bar(cast(Any, data), [5, 4, 3], num_done=2) as bar:
        bar.show([], 0)
        bar.show([FinishedRequest(record=record(5))], 40)
        bar.show([FinishedRequest(record=record(4))], 80)
        assert re.fullmatch(r"4/5 rows, [\d,.]+ rows/s, [\d,]+ t/s, 0:00:00 left", bar.said())
        bar.show([FinishedRequest(record=record(3))], 120)
    return file.getvalue()


def test_the_bar_counts_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(True, monkeypatch)
    assert "5/5 rows" in said and " rows/s, " in said and " t/s" in said and "0:00:00" in said


def test_there_is_no_bar_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False, monkeypatch) == ""


def test_a_log_has_a_line_now_and_then_of_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever is busy with it: the thread that says it asks nobody."""
    monkeypatch.setattr(periodic_status_line, "_SECONDS", 0.01)
    found = ""
    with PeriodicStatusLine() as sign:
        steps: list[tuple[Any, str]] = [
            (lambda: sign.show("opening"), r"\d+ s: opening\n"),
            (lambda: sign.progress("weights", 1, 4), r"\d+ s: weights 25 %\n"),
            (lambda: sign.follow(lambda: "7/9 rows"), r"\d+ s: 7/9 rows\n"),
        ]
        for begin, said in steps:
            begin()
            deadline = time.monotonic() + 10
            while not re.search(said, found) and time.monotonic() < deadline:
                time.sleep(0.005)
                found += capfd.readouterr().err
            assert re.search(said, found)
