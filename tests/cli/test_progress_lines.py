"""Plain lines about slow work on standard error without a terminal."""

from __future__ import annotations

import time

import pytest

from tilewright.utils import status_line


def test_progress_without_a_terminal_is_plain_lines_about_slow_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "_NEW_LINE_S", 0.05)
    monkeypatch.setattr(status_line, "_SAME_LINE_S", 0.2)
    sign = status_line.StatusLine()
    sign.progress("trace", 0, 1)
    sign.clear()  # quick work is not said
    sign.progress("building", 0, 1)
    time.sleep(0.4)
    sign.progress("weights", 1, 4)
    time.sleep(0.4)
    sign.clear()
    lines = capfd.readouterr().err.splitlines()
    assert (
        lines[0] == "building ..." and "weights ..." in lines and lines[-1] == "weights 25 % (0 s)"
    )
    known = {"building ...", "building ... (0 s)", "weights ...", "weights 25 % (0 s)"}
    assert {*lines} <= known
    time.sleep(0.1)
    assert capfd.readouterr().err == ""
