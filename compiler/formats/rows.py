"""Tensors as rows of blocks: reshaping, padding, and walking them in pieces that stay in cache."""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 1 << 17


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[R, K]``, a view where strides allow."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def pad_blocks(x_RK: torch.Tensor, block: int) -> torch.Tensor:
    """Zeros up to a whole block count in the last dimension; a full one passes untouched."""
    missing = -x_RK.shape[-1] % block
    return torch.nn.functional.pad(x_RK, (0, missing)) if missing else x_RK


def row_chunks(num_rows: int, length: int) -> list[slice]:
    """Slices of whole rows, each of about ``CHUNK_ELEMENTS`` elements; none of empty rows."""
    if length == 0:
        return []
    step = max(1, CHUNK_ELEMENTS // length)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
