"""Operators on image tiles: embeddings, gates, padding and features.

Legend: N tiles, P rows per tile, C channels, A aspect ratios, K selected layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, like, operator


def _elementwise(x: Tensor, *_: object) -> Cost:
    return Cost(3.0 * x.numel(), 2.0 * x.numel(), x.numel())


@operator(fake=lambda residual, x, gate: like(residual), cost=_elementwise)
def add_gated(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Return ``residual + tanh(gate) * x``. ``gate`` is ``[1]``."""
    return residual + gate.tanh() * x


@operator(fake=lambda x, table, aspect, gate: like(x), cost=_elementwise)
def add_tile_rows(x: Tensor, table: Tensor, aspect: Tensor, gate: Tensor) -> Tensor:
    """Add ``tanh(gate)`` times an aspect ratio's rows to ``x [N, P, C]``.

    A row in ``table [A, N * rows * C]`` has a vector per tile, or a vector per tile row.
    """
    tiles, _, width = x.shape
    return x + gate.tanh() * table.index_select(0, aspect).view(tiles, -1, width)


@operator(fake=lambda x, rows, gate: like(x), cost=_elementwise)
def add_position_rows(x: Tensor, rows: Tensor, gate: Tensor) -> Tensor:
    """Add ``1 - tanh(gate)`` times ``rows [P, C]`` to all tiles in ``x [N, P, C]``."""
    return x + (1 - gate.tanh()) * rows


def _moved(x: Tensor, *_: object) -> Cost:
    return Cost(0.0, x.numel(), 2.0 * x.numel())


@operator(
    fake=lambda x, row: x.new_empty((x.shape[0], x.shape[1] + 1, x.shape[2])),
    cost=_moved,
)
def prepend_row(x: Tensor, row: Tensor) -> Tensor:
    """Insert ``row [C]`` at the start in all tiles, ``x [N, P, C]``."""
    return torch.cat((row.expand(x.shape[0], 1, -1), x), dim=1)


@operator(
    fake=lambda x, count: x.new_empty((x.shape[0] * count, x.shape[2])),
    cost=lambda x, count: Cost(0.0, x.numel(), x.shape[0] * count * x.shape[2]),
)
def pad_rows(x: Tensor, count: int) -> Tensor:
    """Append zeros to all tiles, ``x [N, P, C]``. Return ``[N * count, C]``."""
    return torch.nn.functional.pad(x, (0, 0, 0, count - x.shape[1])).flatten(0, 1)


@operator(
    fake=lambda tensors: tensors[0].new_empty(
        (tensors[0].shape[0], sum(tensor.shape[1] for tensor in tensors))
    ),
    cost=lambda tensors: Cost(0.0, *[sum(tensor.numel() for tensor in tensors)] * 2),
)
def join_columns(tensors: list[Tensor]) -> Tensor:
    """Concatenate ``[rows, columns]`` tensors along the columns."""
    return torch.cat(tensors, dim=-1)


def _features_cost(x: Tensor, kept: list[Tensor], num_tiles: int, num_rows: int) -> Cost:
    written = num_tiles * num_rows * x.shape[1] * (1 + len(kept))
    return Cost(0.0, x.numel() * (1 + len(kept)), written)


@operator(
    fake=lambda x, kept, num_tiles, num_rows: x.new_empty(
        (num_tiles * num_rows, x.shape[1] * (1 + len(kept)))
    ),
    cost=_features_cost,
)
def tile_features(x: Tensor, kept: list[Tensor], num_tiles: int, num_rows: int) -> Tensor:
    """Return all tile features without padding, ``[N * P, C * (1 + K)]``.

    Channels from the selected layers alternate after the channels from ``x``.

    Args:
        x: Result from the last layer, ``[N * padded rows, C]``.
        kept: Values from the selected layers, with the same shape.
        num_tiles: Tile count.
        num_rows: Row count per tile without padding.
    """
    joined = torch.cat((x, torch.stack(kept, dim=-1).flatten(-2)), dim=-1)
    return joined.unflatten(0, (num_tiles, -1))[:, :num_rows].flatten(0, 1)
