"""Commands and scripts in a user's folder with packages named as ours: theirs are never imported by
us, ours never by them.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

NAMES = ("tilewright", "compiler", "models", "demo", "bench", "precision_cfgs", "tests")
COMMAND = Path(sysconfig.get_path("scripts")) / "tilewright"

EVERY_HELP = """
import sys
from tilewright.cli.main import MAINTAINERS, MOVED, VERBS, main
for verb in [*VERBS, *MOVED, *sorted(MAINTAINERS)]:
    try:
        code = main([verb, "--help"])
    except SystemExit as left:
        code = left.code
    assert code == 0, verb
"""
SCRIPT = """
import models
from tilewright import LLM, Engine, EngineConfig, compile, load
from tilewright.models import find_model
assert models.MINE and LLM and Engine and EngineConfig and compile and load and find_model
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('their {name}')")
    return tmp_path


def run(folder: Path, *argv: str | Path) -> str:
    """Standard output of a process that must succeed, started in the folder."""
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_is_ours(folder: Path) -> None:
    out = run(folder, sys.executable, "-P", "-c", EVERY_HELP)
    assert "usage: tilewright run" in out and "usage: python -m bench compare" in out


def test_a_model_runs(
    folder: Path,
    tiny_gguf: Path,
) -> None:
    few = ("--max-generated-tokens", "2", "--repeat-batches", "1")
    assert "decode (t/s/u)" in run(
        folder, COMMAND, "bench", "--model", tiny_gguf, "--prompt", "hello", *few
    )


def test_a_script_has_its_own_models_and_our_package(folder: Path) -> None:
    """Beside a script only its own ``tilewright`` would be in the way."""
    (folder / "tilewright" / "__init__.py").unlink()
    (folder / "tilewright").rmdir()
    (folder / "models" / "__init__.py").write_text("MINE = True")
    (folder / "script.py").write_text(SCRIPT)
    run(folder, sys.executable, "script.py")
