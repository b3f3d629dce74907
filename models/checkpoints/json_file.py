"""Reads a JSON object from a file. Errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.errors import CheckpointError, one_line
from tilewright.utils.files import read_regular


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: The file is missing, is not JSON, or has another value than an object.
    """
    try:
        values = json.loads(read_regular(path))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}; allowed: a readable file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not JSON: {one_line(error)}; allowed: a JSON object"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: has a {type(values).__name__}; allowed: a JSON object")
    return values
