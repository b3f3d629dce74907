"""Reading a JSON object from a file, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.errors import CheckpointError, one_line
from tilewright.utils.files import read_regular


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that the file at ``path`` holds.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds something other than an object.
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
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; allowed: a JSON object")
    return values
