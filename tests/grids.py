"""Which cases of a grid run by default, and the mark of those that do not.

Triton's interpreter is slow: without a GPU the whole grid is marked slow, with one it is marked
gpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

WHOLE_GRID = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.slow


def grid(shapes: Sequence[tuple[Any, ...]], kinds: Sequence[object]) -> list[Any]:
    """Every shape in every kind, the kind last; by default each shape in one kind, in turn, so that
    every kind and every shape is there.
    """
    period = min(len(shapes), len(kinds))
    return [
        pytest.param(*shape, kind, marks=[] if (row - column) % period == 0 else [WHOLE_GRID])
        for row, shape in enumerate(shapes)
        for column, kind in enumerate(kinds)
    ]


def only(kept: Iterable[object], cases: Iterable[Any]) -> list[Any]:
    """The cases, those that are not ``kept`` by default marked."""
    quick = list(kept)
    found = [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in quick else [WHOLE_GRID],
        )
        for case in cases
    ]
    assert sum(not each.marks for each in found) == len(quick), f"{quick} are not all cases"
    return found
