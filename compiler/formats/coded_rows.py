"""Encoded matrices as bytes, row by row: a file reader can slice rows.

Block formats only. A row of block floating point is its exponents, then its codes; a row of
ggml's blocks is as in ggml's files; a row of scaled codes is its packed blocks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilewright.compiler.formats.base import BlockEncoded, DataFormat, Encoded, ScaledEncoded
from tilewright.compiler.formats.block_float import BlockFloat
from tilewright.compiler.formats.ggml import GgmlFormat
from tilewright.compiler.formats.rows import pad_blocks
from tilewright.compiler.formats.scaled_codes import ScaledCodes
from tilewright.errors import CheckpointError


def code_rows(format_: DataFormat, encoded: Encoded) -> Tensor:
    """Return uint8 ``[rows, bytes]`` for a matrix with blocks along its last axis."""
    if isinstance(format_, BlockFloat):
        assert isinstance(encoded, BlockEncoded)
        num_rows = encoded.exponents.shape[0]
        elements = format_.pack_codes(encoded.mantissas).view(num_rows, -1)
        return torch.cat([encoded.exponents, elements], dim=1)
    assert isinstance(format_, GgmlFormat | ScaledCodes) and isinstance(encoded, ScaledEncoded)
    padded = dataclasses.replace(encoded, codes=pad_blocks(encoded.codes, format_.block))
    return format_.pack_encoded(padded).view(encoded.codes.shape[0], -1)


def decode_rows(format_: DataFormat, coded: Tensor, length: int) -> Tensor:
    """Return float32 ``[rows, length]`` for the bytes from `code_rows`.

    Raises:
        CheckpointError: for another row size.
    """
    num_rows = coded.shape[0]
    format_.check_nbytes(coded.numel(), num_rows * format_.nbytes((1, length)), (num_rows, length))
    if coded.dtype != torch.uint8:
        raise CheckpointError(f"codes of {format_.name} as {coded.dtype}; allowed: uint8")
    if isinstance(format_, BlockFloat):
        num_blocks = -(-length // format_.block)
        mantissas = format_.unpack_codes(coded[:, num_blocks:].reshape(-1)).view(num_rows, -1)
        return format_.dequantise(BlockEncoded(coded[:, :num_blocks], mantissas[:, :length], -1))
    assert isinstance(format_, GgmlFormat | ScaledCodes)
    return format_.unpack(coded.reshape(-1), (num_rows, length))
