"""Where graphs are dumped after every pass, if anywhere; importing it does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from tilewright.errors import ConfigError

DUMP_VARIABLE = "TILEWRIGHT_DUMP"


def dump_folder(named: Path | None = None) -> Path | None:
    """Returns the folder ``named``, or else the one that ``TILEWRIGHT_DUMP`` names, and makes it;
    None where neither names one.

    Raises:
        ConfigError: when it is no folder that can be made.
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
