"""FP8 (e4m3) operands of matmuls: rows of x and of bfp4 weights, with a power-of-two scale for each
row.

A value has a sign, ``4`` exponent bits (bias ``7``) and ``3`` fraction bits. ``0x7F`` is NaN and
``448`` is the largest value. Values below ``2 ** -6`` are multiples of ``2 ** -9``. A bfp4 weight
is exact in e4m3 if the block exponents in a row differ by 15 or less. Uses torch operations only.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn

LEAST_LOFI = 33
"""Minimum number of rows for e4m3 operands in lofi matmuls. With 32 rows, an H200 ran bfloat16
operands 2 % faster in a whole model.
"""

MAX_BLOCK_TOKENS = 64
"""Maximum rows of Triton matmuls that decode a block format once for all rows."""


def least_lofi(*, has_cpp: bool) -> int:
    """Return the minimum number of rows for e4m3 operands.

    Without CUDA C++ kernels, Triton reads the block format for more rows.
    """
    return LEAST_LOFI if has_cpp else MAX_BLOCK_TOKENS + 1


_X_EXPONENT = 7
"""Exponent of the largest value after scaling: [128, 256), so that no value of x exceeds
448.
"""
_WEIGHT_EXPONENT = 8
"""Exponent of the largest value after scaling. The value is in [256, 448]."""


def _powers(x_MK: Tensor, exponent: int) -> Tensor:
    """Return float32 ``[M, 1]``: the scale that gives a row's largest value the exponent
    ``exponent``.
    """
    largest = x_MK.abs().amax(-1, keepdim=True).float()
    bits = (largest.view(torch.int32) >> 23) - exponent
    return (bits.clamp(min=1) << 23).view(torch.float32).where(largest > 0, 1.0)


def round_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to e4m3, to nearest even, with independent rows.

    Return e4m3 ``[M, K]`` and power-of-two row scales, float32 ``[M, 1]``.
    """
    scales = _powers(x_MK, _X_EXPONENT)
    return (x_MK.float() / scales).to(CODES), scales


def exact_rows(dense_NK: Tensor) -> tuple[Tensor, Tensor] | None:
    """Convert a bfp4 weight to e4m3 ``[N, K]`` and row scales, float32 ``[N, 1]``.

    Return None if a value is inexact.
    """
    scales = _powers(dense_NK, _WEIGHT_EXPONENT)
    codes = (dense_NK.float() / scales).to(CODES)
    if not torch.equal(codes.float() * scales, dense_NK.float()):
        return None
    return codes, scales


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 ``[M, K]``: e4m3 values times their row scales. Exact."""
    return codes.float() * scales
