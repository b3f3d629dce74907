"""A sweep's file, of results that nobody measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sweep.measured import SWEEP
from tests.sweep_cells import journal

Sweep = Callable[..., Path]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Writes a sweep's file."""

    def write(name: str = "sweep", results: Any = None, **header: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        journal(path, SWEEP if results is None else results, **header)
        return path

    return write
