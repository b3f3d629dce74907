"""FP8 (e4m3) operands of products: rows of x and of bfp4 weights, each with a power of two.

A code is sign, 4 bits of exponent (bias 7), 3 of fraction; 0x7F is NaN, 448 the largest value,
below 2 ** -6 codes are multiples of 2 ** -9. A bfp4 weight is a magnitude of 3 bits times a power
of two of its block, so that it is a code exactly as long as the exponents of a row's blocks differ
by 15 or less: 7 * 2 ** 6 is the largest value, 1 * 2 ** -9 the smallest. Torch operations alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn

LEAST_LOFI = 17
"""Rows from which on a lofi product takes e4m3 operands, as measured on an H200: with fewer a
weight's bytes count, of which blocks are half as many.
"""

_X_EXPONENT = 7
"""A row's largest value becomes one in [128, 256): no value of x is rounded to more than 448."""
_WEIGHT_EXPONENT = 8
"""A row's largest value, 4 to 7 times a power of two, becomes one in [256, 448]."""


def _powers(x_MK: Tensor, exponent: int) -> Tensor:
    """float32 ``[M, 1]``: what brings the exponent of a row's largest value to one given."""
    largest = x_MK.abs().amax(-1, keepdim=True).float()
    bits = (largest.view(torch.int32) >> 23) - exponent
    return (bits.clamp(min=1) << 23).view(torch.float32).where(largest > 0, 1.0)


def round_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """x (floating point) as codes ``[M, K]``, to nearest even, and what multiplies each row of
    them, float32 ``[M, 1]``: a power of two. Rows do not depend on each other.
    """
    scales = _powers(x_MK, _X_EXPONENT)
    return (x_MK.float() / scales).to(CODES), scales


def exact_rows(dense_NK: Tensor) -> tuple[Tensor, Tensor] | None:
    """A weight's values (bfp4's, floating point) as codes ``[N, K]`` and what multiplies each row,
    float32 ``[N, 1]``; None where a value is no code times its row's power of two.
    """
    scales = _powers(dense_NK, _WEIGHT_EXPONENT)
    codes = (dense_NK.float() / scales).to(CODES)
    if not torch.equal(codes.float() * scales, dense_NK.float()):
        return None
    return codes, scales


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[M, K]`` of codes and their rows' powers of two: exact."""
    return codes.float() * scales
