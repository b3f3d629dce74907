"""Tuning values of the op tables: a JSON file for each measured GPU.

A file has the sections and types of `DEFAULT`. Its name is a word in the device name, in
lower case: `h200.json` for NVIDIA H200. All further GPUs use `DEFAULT`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tilewright.compiler.devices import gpu_name
from tilewright.errors import ConfigError, allowed

DEFAULT = "h200"
_OPEN = ("pages", "step_us")
"""Sections with a free number of entries."""


_FOLDER = Path(__file__).parent


def file_of(name: str, folder: Path = _FOLDER) -> str:
    """Return a device's file, without suffix."""
    words = name.lower().split()
    return next((word for word in words if (folder / f"{word}.json").is_file()), DEFAULT)


@functools.cache
def tuning(gpu: str | None = None, folder: Path = _FOLDER) -> dict[str, Any]:
    """Return the tuning values in a file.

    Args:
        gpu: File without suffix. None: selected by this machine's first GPU.

    Raises:
        ConfigError: for a file that differs from `DEFAULT` in a key or a type.
    """
    if gpu is None:
        return tuning(file_of(gpu_name(), folder), folder)
    path = folder / f"{gpu}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}; allowed: a JSON object") from None
    if gpu != DEFAULT:
        _check(found, tuning(DEFAULT), path.name)
    return found


def _check(found: Any, wanted: Any, where: str) -> None:
    """Raise an error for a value that has other keys or another type."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            is_open = where.rpartition(".")[2] in _OPEN and isinstance(found, dict) and found
            if not is_open:
                keys = sorted(found) if isinstance(found, dict) else found
                raise ConfigError(f"{where}: {keys}; {allowed(sorted(wanted))}")
        example = next(iter(wanted.values()))
        for key, value in found.items():
            _check(value, wanted.get(key, example), f"{where}.{key}")
    elif isinstance(wanted, list):
        if not isinstance(found, list) or not found:
            raise ConfigError(f"{where}: {found!r}; allowed: a list like {wanted}")
        is_free = where.rpartition(".")[2] in _OPEN
        if len(found) != len(wanted) and not is_free:
            raise ConfigError(f"{where}: {len(found)} values; allowed: {len(wanted)}")
        for at, value in enumerate(found):
            _check(value, wanted[0 if is_free else at], f"{where}[{at}]")
    elif isinstance(found, bool) != isinstance(wanted, bool) or not isinstance(
        found, int | float if isinstance(wanted, float) else type(wanted)
    ):
        raise ConfigError(f"{where}: {found!r}; allowed: {type(wanted).__name__}")
