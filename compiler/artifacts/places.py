"""Where compiled things lie; importing it does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from compiler.errors import ConfigError

CACHE_VARIABLE = "TILEWRIGHT_CACHE"
MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """Where Tilewright keeps what it can compute again (``TILEWRIGHT_CACHE``).

    Raises:
        ConfigError: when the variable is no path.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "tilewright"
    except RuntimeError as error:
        raise ConfigError(f"{CACHE_VARIABLE}={named!r}: no such place ({error})") from None


def digest_memory() -> Path:
    """The folder of remembered file digests."""
    return cache_dir() / "digests"


def is_compiled(path: str | Path) -> bool:
    """Whether ``path`` is a compiled folder, by its manifest."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError, ValueError):
        return False
