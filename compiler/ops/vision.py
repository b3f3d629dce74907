"""Vision tower operators: layer norm, attention without a mask, and resampled grids.

Legend: P patches of an image, C channels, H heads, D head size, N grid rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, like, operator


def _norm_cost(x: Tensor, *_: object) -> Cost:
    return Cost(5.0 * x.numel(), x.numel(), x.numel())


@operator(fake=lambda x, weight, bias, eps: like(x), cost=_norm_cost)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize ``x [..., C]`` to zero mean and unit variance (Ba et al., 2016)."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def _full_cost(q: Tensor, *_: object) -> Cost:
    return Cost(4.0 * q.shape[0] * q.numel(), 3.0 * q.numel(), q.numel())


@operator(fake=lambda q, k, v, scale: like(q), cost=_full_cost)
def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute attention between all rows, ``[P, H, D]`` to ``[P, H, D]``."""
    by_head = [heads.transpose(0, 1).unsqueeze(0) for heads in (q, k, v)]
    attended = torch.nn.functional.scaled_dot_product_attention(
        by_head[0], by_head[1], by_head[2], scale=scale
    )
    return attended.squeeze(0).transpose(0, 1).contiguous()


def _interpolate_cost(grid: Tensor, corners: Tensor, weights: Tensor) -> Cost:
    moved = corners.numel() * grid.shape[-1]
    return Cost(2.0 * moved, moved, corners.shape[0] * grid.shape[-1])


@operator(
    fake=lambda grid, corners, weights: grid.new_empty((corners.shape[0], grid.shape[-1])),
    cost=_interpolate_cost,
)
def interpolate_rows(grid: Tensor, corners: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows ``corners [P, 4]`` in ``grid [N, C]`` with ``weights [P, 4]``."""
    return (grid[corners] * weights.unsqueeze(-1)).sum(1)


@operator(
    fake=lambda x, count: x.new_empty((x.shape[0] // count, x.shape[1] * count)),
    cost=lambda x, count: Cost(0.0, x.numel(), x.numel()),
)
def merge_rows(x: Tensor, count: int) -> Tensor:
    """Concatenate every ``count`` rows in ``x [P, C]``: ``[P / count, C * count]``."""
    return x.reshape(-1, x.shape[1] * count).clone()


@operator(
    fake=lambda x, rows: like(x),
    cost=lambda x, rows: Cost(1.0 * x.numel(), 2.0 * x.numel(), x.numel()),
)
def add_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x [P, C]`` plus a parameter's ``rows [P, C]``."""
    return x + rows


@operator(
    fake=lambda x, side: x.new_empty((side * side, x.shape[1])),
    cost=lambda x, side: Cost(1.0 * x.numel(), x.numel(), side * side * x.shape[1]),
)
def pool_blocks(x: Tensor, side: int) -> Tensor:
    """Average the square blocks of a square grid ``x [P, C]``: ``[side * side, C]``."""
    size = round(x.shape[0] ** 0.5) // side
    return x.unflatten(0, (side, size, side, size)).mean((1, 3)).flatten(0, 1)


@operator(
    fake=lambda x, weight, factor: x.new_empty((x.shape[0], weight.shape[1])),
    cost=lambda x, weight, factor: Cost(
        2.0 * x.shape[0] * weight.numel(), x.numel() + weight.numel(), x.shape[0] * weight.shape[1]
    ),
)
def project_rows(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """Return ``x [P, C] @ weight [C, D]``, times ``factor``."""
    return torch.matmul(x, weight) * factor
