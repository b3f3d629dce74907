"""The folder for graph dumps after every pass. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.errors import ConfigError

DUMP_VARIABLE = "TILEWRIGHT_DUMP"


def dump_folder(named: Path | None = None) -> Path | None:
    """Create and return the folder ``named``, by default the value of ``TILEWRIGHT_DUMP``.

    Return None without either.

    Raises:
        ConfigError: The folder cannot be created.
    """
    path = named or os.environ.get(DUMP_VARIABLE)
    if not path:
        return None
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        origin = "--dump " if named else f"{DUMP_VARIABLE}="
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{origin}{path}: not a folder that can be written ({reason})") from None
    return folder
