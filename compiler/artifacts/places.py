"""Where compiled things lie; importing it does not import torch."""

from __future__ import annotations

from pathlib import Path

from tilewright.compiler.files import cache_dir

MANIFEST = "manifest.json"


def digest_memory() -> Path:
    """The folder of remembered file digests."""
    return cache_dir() / "digests"


def is_compiled(path: str | Path) -> bool:
    """Whether ``path`` is a compiled folder, by its manifest."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError, ValueError):
        return False
