"""Final hidden states of prompt chunks, pooled on the device and sent to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compiler.targets.interface.step import Pooled, SampledTokens

_ROWS = 4096
"""Rows normed at a time: the temporary tensors of longer chunks would take memory of the pages."""


def pool_rows(x: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    """Return the sum of the normed rows of ``x [T, hidden]``, then the last one: float32
    ``[2, hidden]``.

    Args:
        norm: Weight and epsilon. None: the rows are normed already.
    """
    total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    states = x[:0].float()
    for first in range(0, len(x), _ROWS):
        states = x[first : first + _ROWS].float()
        if norm is not None:
            weight, eps = norm
            scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
            states = states * scale * weight.float()
        total += states.sum(0)
    return torch.stack((total, states[-1]))


def read_pooled(pooled: Tensor, count: int) -> Callable[[], SampledTokens]:
    """Send ``pooled [2, hidden]`` of ``count`` tokens to the host. Return its reader."""
    if pooled.device.type != "cuda":
        return lambda: _chosen(pooled, count)
    place = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True)
    place.copy_(pooled, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> SampledTokens:
        event.synchronize()
        return _chosen(place, count)

    return read


def _chosen(pooled: Tensor, count: int) -> SampledTokens:
    total, last = pooled.numpy().copy()
    return SampledTokens((), (), pooled=Pooled(count, total, last))
