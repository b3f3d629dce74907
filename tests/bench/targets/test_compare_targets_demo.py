"""``demo/compare_targets.py`` started as a script, from a folder that is not the clone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "demo" / "compare_targets.py"


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [(["--help"], 0, "usage: tilewright compare-targets", ""), (["--runs", "tpu"], 2, "", "'tpu'")],
)
def test_from_another_folder(
    tmp_path: Path, argv: list[str], code: int, out: str, err: str
) -> None:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *argv], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == code
    assert found.stdout.startswith(out) and err in found.stderr
    assert len(found.stderr.splitlines()) == (code == 2)
    assert list(tmp_path.iterdir()) == []
