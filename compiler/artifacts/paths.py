"""Compiled program paths. Importing this does not import torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tilewright.utils.files import cache_dir, read_regular

MANIFEST = "manifest.json"
_PREFIX = "rank_"


def digest_memory() -> Path:
    """Return the cached file digest directory."""
    return cache_dir() / "digests"


def is_compiled(path: str | Path) -> bool:
    """Return whether ``path`` is a compiled directory: it has a manifest."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError, ValueError):
        return False


class _ManifestTarget(msgspec.Struct):
    target: str


def target_of(folder: Path) -> str | None:
    """Return a compiled directory's target. None: the manifest is unreadable."""
    try:
        return msgspec.json.decode(read_regular(folder / MANIFEST), type=_ManifestTarget).target
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def part_of(folder: Path, rank: int) -> Path:
    """Return the directory of a rank's program."""
    return folder / f"{_PREFIX}{rank}"


def is_of_another(name: str, rank: int) -> bool:
    """Return whether a file, relative to the directory, belongs to another rank's program."""
    first = name.partition("/")[0]
    return first.startswith(_PREFIX) and first != f"{_PREFIX}{rank}"
