"""How the library of kernels is compiled: units, flags, commands, and what tells one from another.

Nothing of the package is imported: setup.py reads this file too, for wheels that carry the library.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno"),  # a sum has the same bits on every instruction set
)
_ISA_FLAGS = {
    "isa_avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
    "isa_avx2": ("-march=x86-64-v3",),
    "isa_neon": ("-march=armv8.2-a+dotprod+fp16",),
}
ARM = ("aarch64", "arm64")
_OF_MACHINES = {
    **dict.fromkeys(("x86_64", "AMD64"), ("isa_avx512", "isa_avx2")),
    **dict.fromkeys(ARM, ("isa_neon",)),
}


def units(machine: str | None = None) -> list[Path]:
    """The translation units that a machine's processors have instructions for; None: this one's."""
    own = _OF_MACHINES.get(machine or platform.machine(), ())
    return [
        each
        for each in sorted(SOURCES.glob("*.cpp"))
        if each.stem in own or each.stem not in _ISA_FLAGS
    ]


def flags_of(unit: Path) -> tuple[str, ...]:
    """How a unit is compiled. The scalar one is for machines without vectors: small, not fast."""
    level = "-O1" if unit.stem == "isa_scalar" else "-O2"
    return (*_FLAGS, level, *_ISA_FLAGS.get(unit.stem, ()))


def commands(compiler: str, folder: Path, library: Path) -> list[list[str]]:
    """The commands that compile each unit into ``folder``, in any order, and the one that links."""
    objects = [(unit, str(folder / f"{unit.stem}.o")) for unit in units()]
    compiling = [
        [compiler, *flags_of(unit), "-c", str(unit), "-o", target] for unit, target in objects
    ]
    names = [target for _, target in objects]
    return [*compiling, [compiler, "-shared", "-pthread", *names, "-o", str(library)]]


def digest(compiler: bytes = b"") -> str:
    """What tells a library from others: its sources, flags, processor, and the ``compiler``."""
    found = hashlib.sha256(compiler + platform.machine().encode())
    for unit in units():
        found.update(repr(flags_of(unit)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h", ".inl"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def packaged_name() -> str:
    """What the file of a library that comes with the package is called, beside this one."""
    return f"kernels-{digest()[:16]}.so"
