"""``python -m bench fit-perf-model`` started as a script, from a folder that is not the clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "bench"


def script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "fit-perf-model", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_help_from_another_folder(tmp_path: Path) -> None:
    found = script(tmp_path, "--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert "--write" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    found = script(tmp_path, "--speeds", "nosuch.md")
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1 and "nosuch.md" in found.stderr
