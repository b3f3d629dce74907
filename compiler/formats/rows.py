"""Tensors as rows of blocks: reshaping, padding, and chunks for the cache."""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 1 << 17
"""Elements of a chunk on a CPU: a chunk's intermediates fit in a cache."""

GPU_CHUNK_ELEMENTS = 1 << 22
"""Elements of a chunk on a GPU: a launch's work exceeds its cost."""


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape ``[..., K]`` to ``[R, K]``, as a view if strides allow."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def pad_blocks(x_RK: torch.Tensor, block: int) -> torch.Tensor:
    """Pad the last dimension with zeros to whole blocks. Return ``x_RK`` itself if it has them."""
    missing = -x_RK.shape[-1] % block
    return torch.nn.functional.pad(x_RK, (0, missing)) if missing else x_RK


def row_chunks(x_RK: torch.Tensor) -> list[slice]:
    """Return slices of whole rows, each with about a chunk's elements. Empty rows give no slice."""
    num_rows, length = x_RK.shape
    if length == 0:
        return []
    elements = CHUNK_ELEMENTS if x_RK.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    step = max(1, elements // length)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
