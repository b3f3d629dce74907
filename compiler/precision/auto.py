"""Precision ``auto``: the default configuration for a checkpoint.

Receives types and a size. Reads no files.
"""

from __future__ import annotations

from collections.abc import Sequence

AUTO = "auto"
UNQUANTISED = "accuracy"
SMALL = "stored-float-prefill"
SMALL_BYTES = 500_000_000
"""Files below this size hold small models, whose logits are often near ties."""
HOLDS_STORED = ("reference", "null", "cpu", "cpu-native", "cuda")
"""The targets that run a quantized file as it is stored. On cuda, a note reports the formats that
no kernel reads.
"""
_HAS_PHASES = ("cpu-native",)
"""The targets with their own arithmetic for prefill, at no cost for decode steps."""


def choose_precision(
    quantised: Sequence[str], target: str, num_bytes: int | None = None
) -> tuple[str, str]:
    """Return the name of the configuration that ``auto`` means, and a line with the reason.

    The rule, in this order:

    - ``accuracy`` for float weights, and on a target without the stored formats.
    - ``stored-float-prefill`` for a file under 0.5 GB, on a target with two phases. It agrees best
      with fp32 among configurations at 85 % of the speed or more: decode costs nothing.
    - ``stored`` otherwise.

    ``quantised``: the stored block types (``Q4_1``); none for floats.
    ``num_bytes``: the file size; None if it is unknown.
    """
    types = ", ".join(quantised)
    if not quantised:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for the weights are not quantised"
    if target not in HOLDS_STORED:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for {target} does not hold {types}"
    if target in _HAS_PHASES and num_bytes is not None and num_bytes < SMALL_BYTES:
        return SMALL, f"precision {AUTO}: {SMALL}, the file's {types}; the file is under 0.5 GB"
    return "stored", f"precision {AUTO}: stored, the file's {types}"
