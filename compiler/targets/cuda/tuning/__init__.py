"""Tuning values of the op tables: a JSON file for each measured GPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

DEFAULT = "h200"


@functools.cache
def tuning(gpu: str = DEFAULT) -> dict[str, Any]:
    """Return the tuning values measured on ``gpu``. Other GPUs use those of `DEFAULT`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name(f"{gpu}.json").read_text("utf-8"))
    return found
