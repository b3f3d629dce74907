"""The native library under the compiler's sanitizers, in a small program of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tilewright.compiler.targets.cpu.native import build, recipe

CHECK = Path(__file__).with_name("native_check.cpp")
NUM_PROGRAMS = 500
"""Models of which 20 programs each are changed."""

SANITIZERS = ("address,undefined", "thread")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_the_library_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """Every kind of weight, arithmetic and instruction set; then programs of other numbers, which
    are refused or run within their memory. A few minutes of two cores each.
    """
    compiler = build.find_compiler()
    assert compiler is not None
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-DTW_GUARDS")
    objects, running = [], []
    for unit in (*recipe.units(), CHECK):
        objects.append(str(tmp_path / f"{unit.stem}.o"))
        command = [
            *compiler,
            *recipe.flags_of(unit),
            *flags,
            f"-I{recipe.SOURCES}",
            "-c",
            str(unit),
        ]
        running.append(subprocess.Popen([*command, "-o", objects[-1]]))
    assert not any(process.wait() for process in running)
    program = tmp_path / "check"
    subprocess.run([*compiler, "-pthread", *flags, *objects, "-o", str(program)], check=True)
    for given in ([], [str(NUM_PROGRAMS)]):
        said = subprocess.run([program, *given], capture_output=True, text=True, check=False)
        assert said.returncode == 0 and said.stdout == "ok\n", said.stdout + said.stderr
