"""Precision ``auto``: which configuration a checkpoint is run in where nobody chose one.

Knows the types that a checkpoint's tensors are stored in by name, and no files.
"""

from __future__ import annotations

from collections.abc import Sequence

AUTO = "auto"
UNQUANTISED = "accuracy"
HOLDS_STORED = ("reference", "null", "cpu", "cpu-native")
"""The targets that hold the exact values of every format that a file may have."""


def choose_precision(quantised: Sequence[str], target: str) -> tuple[str, str]:
    """The name of the configuration that ``auto`` stands for, and a line that says why.

    ``quantised``: the types in blocks that the checkpoint's tensors are stored in (``Q4_1``), none
    where they are floats. It is ``stored`` for those, where the target holds their values exactly,
    and ``accuracy`` else.
    """
    types = ", ".join(quantised)
    if not quantised:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for the weights are not quantised"
    if target not in HOLDS_STORED:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for {target} does not hold {types}"
    return "stored", f"precision {AUTO}: stored, the file's {types}"
