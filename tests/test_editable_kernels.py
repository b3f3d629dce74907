"""An editable installation with TILEWRIGHT_WHEEL_KERNELS=1 compiles the kernels into the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_wheel import NOT_COPIED, ROOT

COMPILER = """#!/bin/sh
for word; do last=$word; done
echo library > "$last"
"""
NATIVE = Path("compiler", "targets", "cpu", "native", "library")


@pytest.mark.parametrize("switch", ["1", "0"])
def test_editable_installation_compiles_kernels_into_the_clone(switch: str, tmp_path: Path) -> None:
    clone, compiler = tmp_path / "clone", tmp_path / "compiler"
    shutil.copytree(ROOT, clone, ignore=NOT_COPIED, symlinks=True)
    for left in (clone / NATIVE).glob("kernels-*.so"):
        left.unlink()
    (clone / NATIVE / "kernels-0.so").write_text("of other sources")
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    build = "from setuptools.build_meta import build_editable as build; build('.')"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=clone,
        env={**os.environ, "TILEWRIGHT_WHEEL_KERNELS": switch, "CXX": str(compiler)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = [path.read_text() for path in (clone / NATIVE).glob("kernels-*.so")]
    assert built == (["library\n"] if switch == "1" else ["of other sources"])
