"""The native library with the compiler's sanitizers, in a small C++ program."""

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
    """All weight formats, arithmetics and instruction sets, then invalid programs, which are
    refused or stay within memory. Takes minutes on two cores.
    """
    program = built(sanitizer, tmp_path)
    for given in ([], [str(NUM_PROGRAMS)]):
        run(program, given)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_selection_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """For `make sanitize-cpu`: the scalar code, the best instruction set with AddressSanitizer, and
    a third of the formats.
    """
    best = library.library().tw_best_isa()
    kept = {0} if sanitizer == "thread" else {0, best}
    run(built(sanitizer, tmp_path, kept=kept), [])


def built(sanitizer: str, folder: Path, *, kept: set[int] | None = None) -> Path:
    """Return the program with a sanitizer, limited to ``kept`` instruction sets.

    A selection is compiled without optimization, in a fifth of the time. Skip if the compiler lacks
    the sanitizer.
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
        own = "-O0"
    objects, running = [], []
    for first, *others in in_commands(units):
        objects.append(str(folder / f"{first.stem}.o"))
        given = [*recipe.flags_of(first), *fma(first), own, *flags]
        given += [f"-I{recipe.SOURCES}", "-c", str(first)]
        given += [word for unit in others for word in ("-include", str(unit))]
        running.append(subprocess.Popen([*compiler, *given, "-o", objects[-1]]))
    assert not any(process.wait() for process in running)
    program = folder / "check"
    subprocess.run([*compiler, "-pthread", *flags, *objects, "-o", str(program)], check=True)
    return program


def fma(unit: Path) -> list[str]:
    """Return the flag to inline fused multiply-adds of the scalar code if the processor has them.

    Calls of a library function have the same bits and take most of the time.
    """
    is_x86 = any(each.stem == "isa_avx2" for each in recipe.units())
    has_fma = is_x86 and library.library().tw_best_isa() > 0
    return ["-mfma"] if unit.stem == "isa_scalar" and has_fma else []


def in_commands(units: Sequence[Path]) -> list[list[Path]]:
    """Return the units of each compiler command, the longest first.

    Units that are neither an instruction set nor the check share the system headers.
    """
    alone = [each for each in units if each.stem.startswith("isa") or each == CHECK]
    shared = [each for each in units if each not in alone]
    return [*([each] for each in alone if each != CHECK), shared, [CHECK]]


def check_sanitizer(command: Sequence[str], sanitizer: str, folder: Path) -> None:
    """Skip if an empty program does not build or run with the sanitizer."""
    source, program = folder / "nothing.cpp", folder / "nothing"
    source.write_text("int main() {}\n")
    done = subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, check=False
    )
    if done.returncode or subprocess.run([program], capture_output=True, check=False).returncode:
        pytest.skip(f"{command[0]} has no sanitizer {sanitizer}")


def stub(left: Sequence[str], folder: Path) -> Path:
    """Return a source that replaces the excluded instruction sets."""
    path = folder / "left_out.cpp"
    tables = (f"const Kernels* {TABLES[each]}() {{ return nullptr; }}" for each in left)
    lines = ['#include "kernels.h"', "namespace tw {", *tables, "}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(program: Path, given: Sequence[str]) -> None:
    """Run the program. Fail on any sanitizer message."""
    said = subprocess.run([program, *given], capture_output=True, text=True, check=False)
    assert said.returncode == 0 and said.stdout == "ok\n", said.stdout + said.stderr
