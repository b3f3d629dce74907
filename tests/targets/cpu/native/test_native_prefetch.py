"""Prefetches of the native library's matmuls, recorded by a small C++ program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tilewright.compiler.targets.cpu.native.library import build, recipe

AHEAD = Path(__file__).with_name("native_ahead.cpp")


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_threads_prefetch_their_own_panels_once(tmp_path: Path) -> None:
    """Every line of a thread's panels, also across matmuls, and none of other threads' panels."""
    compiler = build.find_compiler()
    assert compiler is not None
    program = tmp_path / "ahead"
    flags = ["-std=c++20", "-pthread", f"-I{recipe.SOURCES}"]
    subprocess.run([*compiler, *flags, str(AHEAD), "-o", str(program)], check=True, timeout=120)
    found = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout[:500]
