"""Softmax and value sums of Blackhole prompts whose attention has a float32 Dst.

The vendor's operator uses its ACCURATE recipe for these calls (tt-metal,
``tech_reports/FlashAttention/SDPAPrecisionRecipes.md``). Scores, weights and sums are float32, and
maxima are bfloat16. The exponential is a grid with a cubic correction. The value sums are
approximate: the matrix unit runs twice, for the upper and the lower bits of the weights.

Shape letters: G key heads, R rows of a key head, L positions, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import packed

_STEPS = 1024
"""Steps of the grid per octave."""
_OFFSET = 31 * _STEPS - 4 * (32512.0 - 32500.818359375)
_CUBIC = (-8.01081703839006e27, 5.39213985142374e28, -1.05653430577460e29, 1.38859037541378e29)
"""Coefficients from the cube down. The polynomial is the quotient of ``2**(m - 1)`` and ``m``."""
_SINK_FACTOR = 0.970
"""The mean ratio of `exponential` and the exact exponential. The kernel weights a sink with it."""


def exponential(x: Tensor, scale: float) -> Tensor:
    """Return ``exp(scale * x)`` times about `_SINK_FACTOR`, float32, for ``x`` up to 0.

    The result has the kernel's relative ripple, and is 0 if its exponent is too small.
    """
    factor = float(torch.tensor(_STEPS * math.log2(math.e) * scale))
    steps = (x.double() * factor + _OFFSET).float().round().clamp(-1.0, 32767.0).int()
    grid = (steps.clamp(min=0) << 13).view(torch.float32)
    mantissa = ((steps & (_STEPS - 1)) << 13 | 127 << 23).view(torch.float32)
    cubic = torch.full_like(mantissa, _CUBIC[0])
    for coefficient in _CUBIC[1:]:
        cubic = cubic * mantissa + coefficient
    return torch.where(steps < _STEPS, 0.0, grid * cubic)


def softmax_sums(
    scores_GRL: Tensor,
    values_LGD: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float,
    chunk: int,
    sinks_GR1: Tensor | None,
) -> Tensor:
    """Return the values weighted by the softmax of float32 scores, float32 ``[G, R, D]``.

    Args:
        multiply: The matrix unit for bfloat16 operands, with a float32 result.
        chunk: Positions per step of the online softmax.
        sinks_GR1: Scores that enter the sum without a value.
    """
    best = torch.full_like(scores_GRL[..., :1], -torch.inf)
    total, out = torch.zeros_like(best), torch.zeros(())
    for start in range(0, scores_GRL.shape[-1], chunk):
        part = scores_GRL[..., start : start + chunk]
        top = torch.maximum(best, packed(_tf32(part.amax(-1, keepdim=True)), "bf16"))
        shift = torch.where(top.isinf(), 0.0, top)
        weights = _tf32(exponential(part - shift, scale))
        kept = ((best - shift) * scale).exp()
        values = values_LGD[start : start + chunk].permute(1, 0, 2)
        upper = (weights.view(torch.int32) & -0x10000).view(torch.float32)
        product = multiply(upper.bfloat16(), values)
        product = product + multiply((weights - upper).bfloat16(), values)
        total, out, best = total * kept + weights.sum(-1, keepdim=True), out * kept + product, top
    if sinks_GR1 is not None:
        total = total + _SINK_FACTOR * ((sinks_GR1 - best) * scale).exp()
    return out * total.reciprocal()


def _tf32(x: Tensor) -> Tensor:
    """Return float32 with 10 fraction bits, as the unpacker truncates it."""
    return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32)
