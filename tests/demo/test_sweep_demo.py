"""``demo/sweep.py`` started as a script, from a folder that is not the clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.sweep_cells import cell, done, planned, speed_result
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.environment import environment

SCRIPT = Path(__file__).resolve().parents[2] / "demo" / "sweep.py"


def script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *argv], cwd=folder, capture_output=True, text=True
    )


def test_help_from_another_folder(tmp_path: Path) -> None:
    found = script(tmp_path, "--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("usage: tilewright sweep PLAN") and "pareto" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_from_another_folder(tmp_path: Path) -> None:
    found = script(tmp_path, "--precisions", "nosuch")
    assert found.returncode == 2 and found.stdout == ""
    assert len(found.stderr.splitlines()) == 1 and "nosuch" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_torn_line_is_one_line_beside_the_end(tmp_path: Path) -> None:
    """As a process of its own, so that Python's own way to print a warning would be seen."""
    of = cell("a")
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", planned(), [of])
    now = environment()
    same = {"commit": now.commit, "versions": now.versions}
    journal.append(done(of, speed_result(of, [100.0], **same)))
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"event":"star')
    found = script(tmp_path, "--resume", "--results", "sweep.jsonl")
    torn, end = found.stderr.splitlines()
    assert "sweep.jsonl:4" in torn and "cut short" in torn
    assert "1 of 1 cells done" in end and found.returncode == 0
    assert journal.path.read_bytes() == whole, "the torn line is cut off"
