"""Where compiled things lie; importing it does not import torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tilewright.utils.files import cache_dir, read_regular

MANIFEST = "manifest.json"
_PREFIX = "rank_"


def digest_memory() -> Path:
    """The folder of remembered file digests."""
    return cache_dir() / "digests"


def is_compiled(path: str | Path) -> bool:
    """Whether ``path`` is a compiled folder, by its manifest."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError, ValueError):
        return False


class _Manifest(msgspec.Struct):
    target: str


def target_of(folder: Path) -> str | None:
    """The target that a compiled folder is for; None where its manifest cannot be read, as opening
    the folder says.
    """
    try:
        return msgspec.json.decode(read_regular(folder / MANIFEST), type=_Manifest).target
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def part_of(folder: Path, rank: int) -> Path:
    """The folder of one rank's program."""
    return folder / f"{_PREFIX}{rank}"


def is_of_another(name: str, rank: int) -> bool:
    """Whether a file, named within the folder, is of another rank's program."""
    first = name.partition("/")[0]
    return first.startswith(_PREFIX) and first != f"{_PREFIX}{rank}"
