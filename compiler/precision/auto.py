"""Precision ``auto``: the default configuration for a checkpoint.

Receives types and a size. Reads no files.
"""

from __future__ import annotations

from collections.abc import Sequence

AUTO = "auto"
UNQUANTISED = "accuracy"
SMALL = {"cpu-native": "stored-float-prefill", "cpu": "stored-float-head"}
"""Configuration of small models by target. ``cpu`` is ONNX Runtime, whose prefill and decode have
the same arithmetic.
"""
SMALL_BYTES = 500_000_000
"""Files below this size hold small models, whose logits are often near ties."""
HOLDS_STORED = ("reference", "null", "cpu", "cpu-native", "cuda")
"""The targets that run a quantized file as it is stored. On cuda, a note reports the formats that
no kernel reads.
"""


def choose_precision(
    quantised: Sequence[str], target: str, num_bytes: int | None = None
) -> tuple[str, str]:
    """Return the name of the configuration that ``auto`` means, and a line with the reason.

    The rule, in this order:

    - ``accuracy`` for float weights, and on a target without the stored formats.
    - ``SMALL`` for a file under 0.5 GB on the CPU: ``stored-float-prefill`` for native kernels and
      ``stored-float-head`` for ONNX Runtime. It agrees best with fp32 among configurations at 85 %
      of the speed or more.
    - ``stored`` otherwise.

    ``quantised``: the stored block types (``Q4_1``); none for floats.
    ``num_bytes``: the file size; None if it is unknown.
    """
    types = ", ".join(quantised)
    if not quantised:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for the weights are not quantised"
    if target not in HOLDS_STORED:
        return UNQUANTISED, f"precision {AUTO}: {UNQUANTISED}, for {target} does not hold {types}"
    if target in SMALL and num_bytes is not None and num_bytes < SMALL_BYTES:
        name = SMALL[target]
        return name, f"precision {AUTO}: {name}, the file's {types}; the file is under 0.5 GB"
    return "stored", f"precision {AUTO}: stored, the file's {types}"
