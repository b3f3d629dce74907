"""Build rules of the kernel library: units, flags, commands, hash, and environment variables.

No package module is imported: setup.py also reads this file, for wheels with the library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno"),  # equal bits for sums on every instruction set
)
_ISA_FLAGS = {
    "isa_avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "isa_avx2": ("-march=x86-64-v3",),
    "isa_neon": ("-march=armv8.2-a+dotprod+fp16",),
}
_LOOSE = (
    *("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math"),
    *("-freciprocal-math", "-ffinite-math-only", "-fno-signed-zeros"),
)
ARM = ("aarch64", "arm64")
_OF_MACHINES = {
    **dict.fromkeys(("x86_64", "AMD64"), ("isa_avx512", "isa_avx2")),
    **dict.fromkeys(ARM, ("isa_neon",)),
}


_FEATURES = {
    "isa_avx512": "avx512f avx512bw avx512vl avx512dq avx512cd avx512_vnni avx512_bf16",
    "isa_avx2": "avx2 fma f16c",
}
_PROCESSOR = Path("/proc/cpuinfo")


def units(machine: str | None = None) -> list[Path]:
    """Return the translation units for a machine's processors. None: this machine."""
    own = _OF_MACHINES.get(machine or platform.machine(), ())
    return [
        each
        for each in sorted(SOURCES.glob("*.cpp"))
        if each.stem in own or each.stem not in _ISA_FLAGS
    ]


def own_units() -> list[Path]:
    """Return the translation units for this processor only: its best instruction set.

    All units if the processor's instruction sets are unknown.
    """
    every = units()
    try:
        lines = _PROCESSOR.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return every
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    best = next((name for name, needed in _FEATURES.items() if has.issuperset(needed.split())), "")
    if not best:
        return every
    return [unit for unit in every if unit.stem == best or not unit.stem.startswith("isa_")]


def flags_of(unit: Path) -> tuple[str, ...]:
    """Return a unit's compiler flags. The scalar unit is compiled for size: it is only a
    fallback.
    """
    level = "-O1" if unit.stem == "isa_scalar" else "-O2"
    return (*_FLAGS, level, *_ISA_FLAGS.get(unit.stem, ()))


def switch(name: str, default: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Return a boolean environment variable (1 or 0), or ``default`` if unset or empty.

    Raises:
        ValueError: The value is neither. The message is a single line.
    """
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}={text[:80]!r}; allowed: 0 or 1")
    return default if not text else text == "1"


def words(name: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Split a variable like ``CXX`` or ``CXXFLAGS`` as a shell does.

    Raises:
        ValueError: A quote is not closed, or a flag reorders sums, which changes bits between
            instruction sets. The message is a single line.
    """
    text = environ.get(name, "")
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{name}={text[:80]!r}: {error}; allowed: words of a shell") from None
    for each in found:
        if each in _LOOSE:
            raise ValueError(f"{name}: {each}; allowed: flags that keep the order of sums")
    return found


def commands(
    compiler: Sequence[str], folder: Path, library: Path, own: Sequence[Path] | None = None
) -> list[list[str]]:
    """Return the compile commands for ``own`` units into ``folder``, then the link command.

    Instruction sets have a command each, the slowest first. The other units share a command, and
    so the time for system headers. ``own`` None: all units. ``compiler`` has its words.
    ``CXXFLAGS`` precede the library's own flags, so the latter win.

    Raises:
        ValueError: See :func:`words`.
    """
    given = [*compiler, *words("CXXFLAGS")]
    chosen = units() if own is None else own
    tables = [unit for unit in chosen if unit.stem.startswith("isa_")]
    first, *others = [unit for unit in chosen if unit not in tables]
    together = [word for unit in others for word in ("-include", str(unit))]
    compiling, names = [], []
    for unit, more in [*((unit, []) for unit in tables), (first, together)]:
        names.append(str(folder / f"{unit.stem}.o"))
        compiling.append([*given, *flags_of(unit), *more, "-c", str(unit), "-o", names[-1]])
    return [*compiling, [*given, "-shared", "-pthread", *names, "-o", str(library)]]


def digest(compiler: bytes = b"", own: Sequence[Path] | None = None) -> str:
    """Return a hash over sources, flags of ``own`` units, processor and ``compiler``. ``own`` None:
    all units.
    """
    found = hashlib.sha256(compiler + platform.machine().encode())
    for unit in units() if own is None else own:
        found.update(repr(flags_of(unit)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h", ".inl"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def packaged_name() -> str:
    """Return the packaged library's file name in this directory."""
    return f"kernels-{digest()[:16]}.so"
