"""The bar of a batch on a terminal: rows, those of an earlier run too, tokens a second, time."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tests.batch.rows import record
from tilewright.compiler.batch.engine import Ended
from tilewright.compiler.commands import batch_progress
from tilewright.compiler.commands.batch_progress import Bar


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(batch_progress, "_SHOW_SECONDS", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    monkeypatch.setattr(batch_progress, "err", lambda: console)
    data: Any = SimpleNamespace(length=lambda row: 10 * row)
    with Bar(cast(Any, data), [5, 4, 3], num_done=2) as bar:
        bar.show([], 0)
        bar.show([Ended(record=record(5))], 40)
        bar.show([Ended(record=record(4)), Ended(record=record(3))], 120)
    return file.getvalue()


def test_the_bar_counts_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(True, monkeypatch)
    assert "5/5 rows" in said and " t/s" in said and "0:00:00" in said


def test_there_is_none_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False, monkeypatch) == ""
