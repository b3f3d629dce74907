"""The native library under the compiler's sanitizers, in a small program of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build, recipe

CHECK = Path(__file__).with_name("native_check.cpp")
NUM_PROGRAMS = 500
"""Models of which 20 programs each are changed."""

SANITIZERS = ("address,undefined", "thread")
TABLES = {
    "isa_scalar": "scalar_kernels",
    "isa_avx2": "avx2_kernels",
    "isa_avx512": "avx512_kernels",
}
EVERY = 3
"""Of the kinds of weights, how many there are to one of a selection."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_library_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """Every kind of weight, arithmetic and instruction set; then programs of other numbers, which
    are refused or run within their memory. A few minutes of two cores each.
    """
    program = built(sanitizer, tmp_path)
    for given in ([], [str(NUM_PROGRAMS)]):
        run(program, given)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_selection_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """What `make sanitize-cpu` runs: plain code, under AddressSanitizer the machine's best
    instruction set too, and one of three kinds of weights.
    """
    best = library.library().tw_best_isa()
    kept = {0} if sanitizer == "thread" else {0, best}
    run(built(sanitizer, tmp_path, kept=kept), [])


def built(sanitizer: str, folder: Path, *, kept: set[int] | None = None) -> Path:
    """The program under a sanitizer; of ``kept`` instruction sets alone, a selection.

    Skips where the compiler has no such sanitizer.
    """
    compiler = build.find_compiler()
    assert compiler is not None
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-DTW_GUARDS"]
    check_sanitizer([*compiler, *flags], sanitizer, folder)
    units, own = [*recipe.units(), CHECK], "-g"
    if kept is not None:
        order = list(TABLES)
        left = [each for number, each in enumerate(order) if number not in kept]
        units = [each for each in units if each.stem not in left] + [stub(left, folder)]
        skipped = sum(1 << order.index(each) for each in left)
        flags += [f"-DTW_SKIPPED={skipped}", f"-DTW_EVERY={EVERY}"]
        own = "-O1"
    objects, running = [], []
    for unit in sorted(units, key=lambda each: not each.stem.startswith("isa")):  # the longest
        objects.append(str(folder / f"{unit.stem}.o"))
        given = [*recipe.flags_of(unit), own, *flags, f"-I{recipe.SOURCES}", "-c", str(unit)]
        running.append(subprocess.Popen([*compiler, *given, "-o", objects[-1]]))
    assert not any(process.wait() for process in running)
    program = folder / "check"
    subprocess.run([*compiler, "-pthread", *flags, *objects, "-o", str(program)], check=True)
    return program


def check_sanitizer(command: Sequence[str], sanitizer: str, folder: Path) -> None:
    """Skip where a program of nothing cannot be built, or run, with it."""
    source, program = folder / "nothing.cpp", folder / "nothing"
    source.write_text("int main() {}\n")
    done = subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, check=False
    )
    if done.returncode or subprocess.run([program], capture_output=True, check=False).returncode:
        pytest.skip(f"{command[0]} has no sanitizer {sanitizer}")


def stub(left: Sequence[str], folder: Path) -> Path:
    """A unit in the place of those of instruction sets that are left out."""
    path = folder / "left_out.cpp"
    tables = (f"const Kernels* {TABLES[each]}() {{ return nullptr; }}" for each in left)
    lines = ['#include "kernels.h"', "namespace tw {", *tables, "}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(program: Path, given: Sequence[str]) -> None:
    """The program says that all is well, and no sanitizer says anything."""
    said = subprocess.run([program, *given], capture_output=True, text=True, check=False)
    assert said.returncode == 0 and said.stdout == "ok\n", said.stdout + said.stderr
