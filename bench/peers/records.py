"""The file of a comparison: a JSON object of parts by name, each with its own date and commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.cli.sweep.files import write_text
from tilewright.errors import ConfigError

SCHEMA = 2


def read_parts(path: Path) -> dict[str, dict[str, Any]]:
    """The parts of a file by name; none where it is missing or empty.

    Raises:
        ConfigError: for a file that is no record of ``python -m bench compare --json``.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
        found: Any = json.loads(content) if content.strip() else {"schema": SCHEMA, "parts": {}}
        if found["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {found['schema']}; allowed: {SCHEMA}")
        parts: dict[str, dict[str, Any]] = found["parts"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: no record; allowed: one of python -m bench compare --json"
        ) from None
    return parts


def write_part(path: Path, name: str, record: dict[str, Any]) -> None:
    """Put a part into a file, in place of one of its name; the others stay as they are.

    Raises:
        ConfigError: for a file that is none, or that cannot be written.
    """
    parts = read_parts(path) | {name: record}
    write_text(path, json.dumps({"schema": SCHEMA, "parts": parts}, indent=1) + "\n")
