"""A kernel of the kernel benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Launch = Callable[[int], object]
"""Launches a kernel on the operands with this index."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for a case.

    Attributes:
        name: The kernel.
        launch: Launches it once.
        num_copies: Number of operand sets.
        num_bytes: Bytes read by a launch. 0: not known.
    """

    name: str
    launch: Launch
    num_copies: int
    num_bytes: float = 0.0
