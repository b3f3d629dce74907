"""Building of the kernel library with the machine's C++ compiler on first use.

It is stored in the cache (or in the directory ``TILEWRIGHT_NATIVE``) under a source hash,
compiler and flags.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilewright.compiler.targets.cpu.native.library.recipe import (
    commands,
    digest,
    own_units,
    packaged_name,
    units,
)
from tilewright.compiler.targets.cpu.native.settings import compiler_words
from tilewright.errors import CompileError, TilewrightError, one_line
from tilewright.utils.files import cache_dir

_COMPILERS = ("g++", "clang++", "c++")
_MOST_SECONDS = 300


def find_compiler() -> list[str] | None:
    """Return the C++ compiler in ``CXX`` (possibly several words: ``ccache g++``), else the first
    found.

    Return None without a compiler.

    Raises:
        ConfigError: ``CXX`` is not valid shell text.
    """
    named = compiler_words("CXX")
    for first, *others in [named] if named else [[each] for each in _COMPILERS]:
        if path := shutil.which(first):
            return [path, *others]
    return None


def is_built() -> bool:
    """Return whether a library exists, so that loading compiles nothing."""
    if packaged_library().exists() and not compiler_words("CXXFLAGS"):
        return True
    compiler = find_compiler()
    return compiler is not None and any(
        _cached_library(compiler, own).exists() for own in (units(), _own_units())
    )


def packaged_library() -> Path:
    """Return the path of the wheel's library for these sources and this processor."""
    return Path(__file__).parent / packaged_name()


def _own_units() -> list[Path]:
    """Return the units to compile on first use. ``CXXFLAGS`` may disable instruction sets."""
    return units() if compiler_words("CXXFLAGS") else own_units()


def _cached_library(compiler: Sequence[str], own: Sequence[Path]) -> Path:
    """Return the path of the cached library of these units, built or not."""
    named = os.environ.get("TILEWRIGHT_NATIVE")
    folder = Path(named) if named else cache_dir() / "native"
    return folder / f"{_key(compiler, own)}.so"


def _wanted_library(compiler: Sequence[str], *, every_isa: bool) -> tuple[Path, list[Path]]:
    """Return a library's cached path and its units: every instruction set if that exists or is
    requested, else this processor's.
    """
    own = units()
    path = _cached_library(compiler, own)
    if not every_isa and not path.exists():
        own = _own_units()
        path = _cached_library(compiler, own)
    return path, own


@functools.cache
def library_path(*, every_isa: bool = False) -> Path:
    """Return the shared library: from the package if its sources match, else from the cache, else
    built.

    A library that is built here has this processor's best instruction set only. ``every_isa``: it
    has every instruction set, for comparisons.

    Raises:
        CompileError: There is no compiler, or compilation fails.
    """
    packaged = packaged_library()
    if packaged.exists() and not compiler_words("CXXFLAGS"):
        return packaged
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        sought = f" (CXX={named[:80]!r} is not found)" if named else ""
        raise CompileError(
            f"backend native: no C++ compiler{sought}; allowed: --backend onnxruntime, or g++ or "
            "clang++ of C++20 (CXX=path)"
        )
    path, own = _wanted_library(compiler, every_isa=every_isa)
    folder = path.parent
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have built every instruction set in the meantime.
            path, own = _wanted_library(compiler, every_isa=every_isa)
            if not path.exists():
                for left in folder.glob("tmp*"):  # of a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    built = compile_library(compiler, Path(temporary), own)
                    os.replace(built, path)
    except OSError as error:
        raise CompileError(f"{folder}: the native library cannot be kept ({error})") from None
    return path


def begin_build() -> None:
    """Build a missing library in a thread, while a model is read. Errors are left to
    `library_path`.
    """
    if not is_built() and find_compiler() is not None:
        threading.Thread(target=_build_quietly, name="kernels", daemon=True).start()


def _build_quietly() -> None:
    with contextlib.suppress(TilewrightError):
        library_path()


def compile_library(
    compiler: Sequence[str], folder: Path, own: Sequence[Path] | None = None
) -> Path:
    """Compile ``own`` units (None: all), one a processor, and link them in ``folder``.

    Raises:
        CompileError: Compilation fails. The message has the compiler's first output.
    """
    library = folder / "library.so"
    *objects, link = commands(compiler, folder, library, own)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_run, objects))
    _run(link)
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"backend native: the C++ compiler took more than {_MOST_SECONDS} s; "
            "allowed: --backend onnxruntime"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), "".join(lines[:1]))
        raise CompileError(
            f"backend native: the C++ compiler failed ({one_line(RuntimeError(first))}); "
            "allowed: --backend onnxruntime, or a compiler of C++20 (CXX=path)"
        )


def _key(compiler: Sequence[str], own: Sequence[Path] | None = None) -> str:
    """Return a hash over sources, units, compiler and flags."""
    said = _version_of(tuple(compiler), os.stat(compiler[0]).st_mtime_ns)
    named = " ".join((*compiler, *compiler_words("CXXFLAGS")))
    return digest(said + named.encode(), own)[:32]


@functools.cache
def _version_of(compiler: tuple[str, ...], changed_ns: int) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
