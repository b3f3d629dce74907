"""NEON's kernels have plain C++'s bits, in a program for ARM that an emulator runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright.compiler.targets.cpu.native.library import recipe

CHECK = Path(__file__).with_name("native_check.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER} or {EMULATOR}"
)
def test_neon_has_the_bits_of_plain_code(tmp_path: Path) -> None:
    """Every kind of weight and arithmetic, alone and in a batch. Some minutes of two cores."""
    objects, running = [], []
    for unit in (*recipe.units("aarch64"), CHECK):
        objects.append(str(tmp_path / f"{unit.stem}.o"))
        command = [COMPILER, *recipe.flags_of(unit), f"-I{recipe.SOURCES}", "-c", str(unit)]
        running.append(subprocess.Popen([*command, "-o", objects[-1]]))
    assert tmp_path.joinpath("isa_neon.o").as_posix() in objects
    assert not any(process.wait() for process in running)
    program = tmp_path / "check"
    subprocess.run([COMPILER, "-static", "-pthread", *objects, "-o", str(program)], check=True)
    emulated = [EMULATOR, "-cpu", "max", str(program)]
    said = subprocess.run(emulated, capture_output=True, text=True, check=False)
    assert said.returncode == 0 and said.stdout == "ok\n", said.stdout + said.stderr
