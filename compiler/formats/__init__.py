"""Number formats and math fidelities by name. Importing this does not import torch."""

from __future__ import annotations

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
from tilewright.compiler.formats.ggml import Q40, Q80, GgmlFormat

__all__ = [
    "BF16",
    "BFP2",
    "BFP4",
    "BFP8",
    "FIDELITIES",
    "FORMATS",
    "FP16",
    "FP32",
    "Q40",
    "Q80",
    "BlockEncoded",
    "BlockFloat",
    "DataFormat",
    "Encoded",
    "Fidelity",
    "FloatFormat",
    "GgmlFormat",
    "ScaledEncoded",
    "get_format",
]

for _format in (FP32, BF16, FP16, BFP8, BFP4, BFP2, Q40, Q80):
    FORMATS.register(_format.name, _format)


def get_format(name: str) -> DataFormat:
    """The format called ``name``.

    Raises:
        ConfigError: for an unknown name, listing the known ones.
    """
    return FORMATS[name]
