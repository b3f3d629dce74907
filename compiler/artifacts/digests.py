"""SHA-256 of whole files, remembered while the file system says that nothing was written to them.

A file's change time cannot be set by a program, so a remembered digest is never that of other
bytes; digests of files changed within the last seconds are not remembered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from tilewright.utils.files import open_regular

_SETTLED_NS = 3_000_000_000
"""Beyond the coarsest clock of a common file system, so that a later write is seen."""


def file_digest(path: Path, memory: Path) -> str:
    """SHA-256 of ``path``, 64 hexadecimal digits; ``memory`` is the folder of remembered ones.

    Raises:
        OSError: when the file cannot be read, or changes while it is.
    """
    before = _state(path)
    known = remembered_digest(path, memory)
    if known is not None:
        return known
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _state(path) != before:
        raise OSError(f"{path} changes while it is read")
    if time.time_ns() - max(before[3:]) > _SETTLED_NS:
        write_whole(_kept(path, memory), json.dumps([before, digest]).encode())
    return digest


def remembered_digest(path: Path, memory: Path) -> str | None:
    """`file_digest` without reading the file; None where it is not remembered.

    Raises:
        OSError: when there is no such file.
    """
    found = _state(path)
    try:
        state, digest = json.loads(_kept(path, memory).read_text(encoding="ascii"))
        if state == found and isinstance(digest, str) and len(digest) == 64:
            return digest
    except (OSError, ValueError, TypeError):
        pass
    return None


def _kept(path: Path, memory: Path) -> Path:
    return memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file, whole or not at all; one that cannot be written is left out."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@functools.cache
def sources_digest() -> str:
    """SHA-256 over Tilewright's own sources, so that no program outlives the code that made it."""
    root = Path(__file__).parents[2]  # the package, whose `compiler` may be a link
    digest = hashlib.sha256()
    for path in _sources(root):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _sources(root: Path) -> Iterable[Path]:
    for package in ("compiler", "models", "distributed", "utils"):
        yield from sorted((root / package).rglob("*.py"))


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
