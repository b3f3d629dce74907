"""Number formats and math fidelities by name. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.compiler.formats.base import (
    FORMATS,
    BlockEncoded,
    DataFormat,
    Encoded,
    ScaledEncoded,
)
from tilewright.compiler.formats.block_float import BFP2, BFP4, BFP8, BlockFloat
from tilewright.compiler.formats.fidelity import FIDELITIES, Fidelity
from tilewright.compiler.formats.floats import BF16, FP16, FP32, FloatFormat
from tilewright.compiler.formats.ggml import (
    EXACT_FORMATS,
    IQ4_XS,
    Q4_K,
    Q5_K,
    Q6_K,
    Q40,
    Q41,
    Q50,
    Q51,
    Q80,
    STORED_NAMES,
    GgmlFileFormat,
    GgmlFormat,
)
from tilewright.compiler.formats.scaled_codes import FP8, MXFP4, NF4, NVFP4, ScaledCodes

__all__ = [
    "BF16",
    "BFP2",
    "BFP4",
    "BFP8",
    "EXACT_FORMATS",
    "FIDELITIES",
    "FORMATS",
    "FP8",
    "FP16",
    "FP32",
    "IQ4_XS",
    "MXFP4",
    "NF4",
    "NVFP4",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q40",
    "Q41",
    "Q50",
    "Q51",
    "Q80",
    "STORED_NAMES",
    "BlockEncoded",
    "BlockFloat",
    "DataFormat",
    "Encoded",
    "Fidelity",
    "FloatFormat",
    "GgmlFileFormat",
    "GgmlFormat",
    "ScaledCodes",
    "ScaledEncoded",
    "exact_blocks",
    "get_format",
    "is_quantised",
    "stored_format",
    "stored_together",
]

_ALL = (
    *(FP32, BF16, FP16, BFP8, BFP4, BFP2, FP8, Q40, Q80, Q41, Q50, Q51, Q4_K, Q5_K, Q6_K, IQ4_XS),
    *(NF4, NVFP4, MXFP4),
)
for _format in _ALL:
    FORMATS.register(_format.name, _format)


def get_format(name: str) -> DataFormat:
    """Return the number format called ``name``.

    Raises:
        ConfigError: The name is unknown. The message lists the known names.
    """
    return FORMATS[name]


def stored_format(stored_type: str) -> str | None:
    """Return the format with exactly the values of ``stored_type``, or None.

    ``stored_type`` is a checkpoint's tensor type. The result has the same type (``Q4_1``, ``BF16``)
    or a larger type (``q6_k`` for ``Q3_K``). Joined tensors with several types (``Q4_0+Q8_0``) have
    none.
    """
    if stored_type in EXACT_FORMATS:
        return EXACT_FORMATS[stored_type]
    return next((name for name, stored in STORED_NAMES.items() if stored == stored_type), None)


def exact_blocks(stored_types: Iterable[str]) -> tuple[str, ...]:
    """Return the block formats with exactly the values of all types, the smallest first.

    Blocks have a power of two as their scale. A target with such blocks can store them instead of
    `stored_format`.
    """
    return (MXFP4.name, BFP8.name) if {*stored_types} == {"MXFP4"} else ()


def is_quantised(stored_type: str) -> bool:
    """Return whether ``stored_type``, a checkpoint's tensor type, contains a quantized type."""
    return not {*stored_type.split("+")} <= {"F32", "F16", "BF16"}


def stored_together(stored_types: Iterable[str]) -> str:
    """Return the format for a weight made from tensors with these types.

    Use the common format if all tensors share it. Otherwise use fp32, a superset.
    """
    found = {stored_format(each) for each in stored_types}
    only = found.pop() if len(found) == 1 else None
    return only or FP32.name
