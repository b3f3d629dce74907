"""Scales of NVFP4 in bytes, and float64 second scales for all rows.

A file's scale is an e4m3 number times or divided by the tensor's second scale, in float32. Factors
and e5m3 bytes are computed from these scales. Tensors with different second scales can be rows of a
weight. The float32 products are equal to the file's scales.

Every file has a factor: the second scale, or its reciprocal. Products of both scales are exact in
float64. Quotients are never within ``2 ** -50`` of the middle of two float32 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.weights.coded_tiles import CodedRows
from tilewright.errors import CheckpointError

_BLOCK = 16
_BIAS = 30
"""Exponent of the largest scale, in the byte."""


def split_scales(rows: CodedRows) -> CodedRows:
    """Return codes with bytes as scales, and second scales.

    Codes get the scales' signs, and are zeros if the scale is 0.

    Raises:
        CheckpointError: Scales are not e4m3 numbers with a common factor.
    """
    scales = rows.scales
    spread = scales.sign().to(torch.int8).unsqueeze(-1).expand(-1, -1, _BLOCK)
    spread = spread.flatten(1)[:, : rows.codes.shape[-1]]
    codes = rows.codes * spread.abs().view(torch.uint8) ^ spread.view(torch.uint8) & 8
    stored = torch.zeros_like(scales, dtype=torch.uint8)
    factors = torch.ones(len(scales), dtype=torch.float64, device=scales.device)
    magnitudes, is_left = scales.abs(), torch.ones_like(factors, dtype=torch.bool)
    largest = magnitudes.amax(-1, keepdim=True).double()
    for eighths in range(8, 16):  # of the largest scale
        left = is_left.nonzero().flatten()
        first = magnitudes[left, :_BLOCK]  # refutes most mantissas
        left = left[_split(first, largest[left], eighths)[2]]
        bytes_, common, fits = _split(magnitudes[left], largest[left], eighths)
        stored[left[fits]], factors[left[fits]] = bytes_[fits], common[fits]
        is_left[left[fits]] = False
    if bool(is_left.any()):
        raise CheckpointError(
            "nvfp4: scales have no common factor, or are more than 30 octaves apart; allowed: e4m3 "
            "scales with second scales, or bf16 for it"
        )
    return CodedRows(codes, stored, second_scales=factors)


def _split(scales: Tensor, largest: Tensor, eighths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, factors and whether rows fit, for the largest scale's mantissa."""
    exact, is_zero = scales.double(), scales == 0
    fraction, exponent = torch.frexp(exact * eighths / (8 * largest.masked_fill(largest == 0, 1)))
    rounded = (fraction * 16).round().masked_fill(is_zero, 8)
    values = torch.ldexp(rounded, exponent - 4)
    # Factors for which all products round to the scales.
    ends = [torch.full_like(scales, end) for end in (0.0, torch.inf)]
    below, above = ((torch.nextafter(scales, end).double() + exact) / 2 / values for end in ends)
    above = above.masked_fill(is_zero, torch.inf).amin(-1)
    factors = ((below.amax(-1) + above) / 2).nan_to_num(posinf=1.0)
    bytes_ = (exponent - 1 + _BIAS) * 8 + rounded.int() - 8
    is_equal = ((values * factors.unsqueeze(-1)).float() == scales) & (bytes_ >= 0) | is_zero
    return bytes_.clamp(0, 255).to(torch.uint8), factors, is_equal.all(-1)


def scales_of(stored: Tensor, factors: Tensor) -> Tensor:
    """Return the float32 scales."""
    bits = (stored.int() << 20) + (127 - _BIAS << 23)
    return (bits.view(torch.float32).double() * factors.unsqueeze(-1)).float()
