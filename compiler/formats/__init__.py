"""Number formats and math fidelities by name. Importing this does not import torch."""

from __future__ import annotations

# floats and block_float fill the registry.
from compiler.formats import block_float, floats
from compiler.formats.base import FORMATS, BlockEncoded, DataFormat, Encoded
from compiler.formats.block_float import BlockFloat
from compiler.formats.fidelity import FIDELITIES, Fidelity
from compiler.formats.floats import FloatFormat

__all__ = [
    "FIDELITIES",
    "FORMATS",
    "BlockEncoded",
    "BlockFloat",
    "DataFormat",
    "Encoded",
    "Fidelity",
    "FloatFormat",
    "block_float",
    "floats",
    "get_format",
]


def get_format(name: str) -> DataFormat:
    """The format called ``name``.

    Raises:
        ConfigError: for an unknown name, listing the known ones.
    """
    return FORMATS[name]
