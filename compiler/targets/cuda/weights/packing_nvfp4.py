"""Scales of NVFP4 in bytes, and float64 second scales for all rows.

A file's scale is an e4m3 number times or divided by the tensor's second scale, in float32. Factors
and e5m3 bytes are computed from these scales. Tensors with different second scales can be rows of a
weight. The float32 products are equal to the file's scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.formats import ScaledEncoded
from tilewright.errors import CheckpointError

_BLOCK = 16
_BIAS = 30
"""Exponent of the largest scale, in the byte."""


def split_scales(encoded: ScaledEncoded) -> tuple[ScaledEncoded, Tensor]:
    """Return codes with bytes as scales, and float64 factors ``[N]``.

    Codes get the scales' signs, and are zeros if the scale is 0.

    Raises:
        CheckpointError: Scales are not e4m3 numbers with a common factor.
    """
    scales = encoded.scales
    spread = scales.sign().to(torch.int8).repeat_interleave(_BLOCK, -1)
    spread = spread[:, : encoded.codes.shape[-1]]
    codes = encoded.codes * spread.abs().view(torch.uint8) ^ spread.view(torch.uint8) & 8
    stored = torch.zeros_like(scales, dtype=torch.uint8)
    factors = torch.ones(len(scales), dtype=torch.float64, device=scales.device)
    left = torch.arange(len(scales), device=scales.device)
    for eighths in range(8, 16):  # of the largest scale
        bytes_, common, fits = _split(scales[left].abs(), eighths)
        stored[left[fits]], factors[left[fits]] = bytes_[fits], common[fits]
        left = left[~fits]
        if not len(left):
            return ScaledEncoded(codes, stored, encoded.axis), factors
    raise CheckpointError("nvfp4: scales have no common factor; allowed: e4m3 scales")


def _split(scales: Tensor, eighths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, factors and whether rows fit, for the largest scale's mantissa."""
    exact, is_zero = scales.double(), scales == 0
    largest = exact.amax(-1, keepdim=True)
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
