"""The library of kernels: compiled with the machine's own C++ compiler when it is first needed, and
kept in the cache (or in the folder that ``TILEWRIGHT_NATIVE`` names) under the hash of its sources
and of how they were compiled.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilewright.compiler.errors import CompileError, one_line
from tilewright.compiler.files import cache_dir

SOURCES = Path(__file__).parent / "source"
_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno"),  # a sum has the same bits on every instruction set
)
_ISA_FLAGS = {
    "isa_avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "isa_avx2": ("-march=x86-64-v3",),
}
_ON_X86 = ("x86_64", "AMD64")
_COMPILERS = ("g++", "clang++", "c++")
_MOST_SECONDS = 300


def find_compiler() -> str | None:
    """The C++ compiler that ``CXX`` names, else the first of those usually there."""
    named = os.environ.get("CXX")
    found = (shutil.which(each) for each in ((named,) if named else _COMPILERS))
    return next((each for each in found if each is not None), None)


@functools.cache
def library_path() -> Path:
    """The shared library, compiled now unless the cache has it.

    Raises:
        CompileError: where there is no compiler, or it refuses.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(
            "backend native: no C++ compiler; allowed: --backend onnxruntime, or g++ or clang++ of "
            "C++20 (CXX=path)"
        )
    named = os.environ.get("TILEWRIGHT_NATIVE")
    folder = Path(named) if named else cache_dir() / "native"
    path = folder / f"{_key(compiler)}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    built = compile_library(compiler, Path(temporary))
                    os.replace(built, path)
    except OSError as error:
        raise CompileError(f"{folder}: the native library cannot be kept ({error})") from None
    return path


def units() -> list[Path]:
    """The translation units that this machine's processors have instructions for."""
    has_x86 = platform.machine() in _ON_X86
    return [
        each for each in sorted(SOURCES.glob("*.cpp")) if has_x86 or each.stem not in _ISA_FLAGS
    ]


def flags_of(unit: Path) -> tuple[str, ...]:
    """How a unit is compiled. The scalar one is for machines without vectors: small, not fast."""
    level = "-O1" if unit.stem == "isa_scalar" else "-O2"
    return (*_FLAGS, level, *_ISA_FLAGS.get(unit.stem, ()))


def compile_library(compiler: str, folder: Path) -> Path:
    """Compile all units, side by side, and link them in ``folder``.

    Raises:
        CompileError: with what the compiler said first.
    """
    objects, running = [], []
    for unit in units():
        objects.append(str(folder / f"{unit.stem}.o"))
        command = [compiler, *flags_of(unit), "-c", str(unit), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE))
    for process in running:
        _finish(process)
    library = folder / "library.so"
    command = [compiler, "-shared", "-pthread", *objects, "-o", str(library)]
    _finish(subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE))
    return library


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        _, said = process.communicate(timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise CompileError(
            f"backend native: the C++ compiler took more than {_MOST_SECONDS} s; "
            "allowed: --backend onnxruntime"
        ) from None
    if process.returncode:
        lines = said.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), "".join(lines[:1]))
        raise CompileError(
            f"backend native: the C++ compiler failed ({one_line(RuntimeError(first))}); "
            "allowed: --backend onnxruntime, or a compiler of C++20 (CXX=path)"
        )


def _key(compiler: str) -> str:
    """What the library depends on: the sources, the compiler, the flags."""
    found = hashlib.sha256()
    said = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    found.update(said + compiler.encode() + platform.machine().encode())
    for unit in units():
        found.update(repr(flags_of(unit)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h", ".inl"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:32]
