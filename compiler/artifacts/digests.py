"""SHA-256 digests for whole files, cached while the file system reports no change.

A program cannot set a file's change time, so a cached digest always matches the file's bytes.
Digests of files modified within the last seconds are not cached.
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
"""Longer than the clock resolution of common file systems, so that a later write is noticed."""


def file_digest(path: Path, memory: Path) -> str:
    """Return the SHA-256 of ``path`` as 64 hexadecimal digits. ``memory`` is the digest cache's
    directory.

    Raises:
        OSError: The file cannot be read, or changes during reading.
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
    """Return the cached `file_digest` without reading the file, or None.

    Raises:
        OSError: The file does not exist.
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
    """Write a small file atomically. Ignore write errors."""
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
    """Return the SHA-256 over Tilewright's sources: changed code invalidates all programs."""
    root = Path(__file__).parents[2]  # the package root; its `compiler` may be a link
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
