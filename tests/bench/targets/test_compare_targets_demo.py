"""``python -m bench compare-targets`` started as a script, from a folder that is not the clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "bench"


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["--help"], 0, "usage: python -m bench compare-targets", ""),
        (["--runs", "tpu"], 2, "", "'tpu'"),
    ],
)
def test_from_another_folder(
    tmp_path: Path, argv: list[str], code: int, out: str, err: str
) -> None:
    command = [sys.executable, str(SCRIPT), "compare-targets", *argv]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == code
    assert found.stdout.startswith(out) and err in found.stderr
    assert len(found.stderr.splitlines()) == (code == 2)
    assert list(tmp_path.iterdir()) == []
