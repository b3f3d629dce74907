"""Quantization grids: candidate scales, rounding, and encoding.

value = code * scale + minimum. Layout: B block elements first, rows N last (``[B, N]``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import BlockFloat, DataFormat, GgmlFormat, ScaledCodes
from tilewright.compiler.formats.base import BlockEncoded, Encoded, ScaledEncoded
from tilewright.compiler.formats.scaled_codes import E2M1, E2M1_LARGEST, nearest_e2m1

_MIN_EXPONENT, _MAX_EXPONENT = -110, 127
# Divisors for the largest value, in signed codes. The usual divisor is first.
_SIGNED_STEPS = (8.0, 7.5, 7.0, 8.5, 9.0, 9.75, -7.0, -7.5, -8.0, -8.75)
_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.83, 0.78)
_SYMMETRIC_SHRINKS = (1.0, 0.98, 0.96)
# Divisors for the largest value, in 4-bit float codes. 6 is the largest code.
_FLOAT_STEPS = (6.0, 5.5, 5.0, 4.5, 4.0, 3.5, 3.0, 6.75)


@dataclass(frozen=True, slots=True)
class Scales:
    """Block scales and minimums (None: zero), float32, equal shapes.

    ``inverse``: reciprocals, if known; 0 for a zero scale.
    """

    scale: Tensor
    minimum: Tensor | None = None
    inverse: Tensor | None = None

    def inverted(self) -> Scales:
        """Return the same scales with their reciprocals, for use on several columns."""
        return Scales(self.scale, self.minimum, _reciprocal(self.scale))

    def pick(self, best_N: Tensor) -> Scales:
        """Select candidate ``best_N[n]`` for each row from scales ``[C, N]``."""
        index = best_N.unsqueeze(0)
        minimum = None if self.minimum is None else self.minimum.gather(0, index)[0]
        return Scales(self.scale.gather(0, index)[0], minimum)


@dataclass(frozen=True, slots=True)
class Grid(ABC):
    """A block format's grid: codes from ``low`` to ``high``."""

    format: DataFormat
    low: float
    high: float

    @abstractmethod
    def candidates(self, block_BN: Tensor) -> Scales:
        """Return candidate scales ``[C, N]`` for N blocks. The format's own choice is first."""

    @abstractmethod
    def encode(self, codes_RK: Tensor, scales_RM: Scales) -> Encoded:
        """Encode signed codes with blocks along the last axis."""

    def codes(self, values: Tensor, scales: Scales) -> Tensor:
        """Round values to codes, as float32. A zero scale gives the code zero."""
        inverse = scales.inverse if scales.inverse is not None else _reciprocal(scales.scale)
        shifted = values if scales.minimum is None else values - scales.minimum
        return (shifted * inverse).round_().clamp_(self.low, self.high)

    def values(self, codes: Tensor, scales: Scales) -> Tensor:
        """Return the values for float32 codes."""
        found = codes * scales.scale
        return found if scales.minimum is None else found.add_(scales.minimum)


class BlockFloatGrid(Grid):
    """Block floating point: the largest value's exponent, or that minus 1."""

    def candidates(self, block_BN: Tensor) -> Scales:
        assert isinstance(self.format, BlockFloat)
        largest_N = block_BN.abs().amax(0)
        exponent_N = torch.frexp(largest_N).exponent - 1
        shift = self.format.mantissa_bits - 1
        steps = [
            torch.ldexp(
                torch.ones_like(largest_N),
                (exponent_N - less).clamp(_MIN_EXPONENT, _MAX_EXPONENT) - shift,
            )
            for less in (0, 1)
        ]
        return Scales(torch.stack(steps).masked_fill_(largest_N < 2.0**_MIN_EXPONENT, 0))

    def encode(self, codes_RK: Tensor, scales_RM: Scales) -> Encoded:
        # The exponent is chosen again from the values. The values stay the same.
        scales_RK = scales_RM.scale.repeat_interleave(self.format.block, 1)
        values_RK = codes_RK.float() * scales_RK[:, : codes_RK.shape[1]]
        encoded = self.format.quantise(values_RK)
        assert isinstance(encoded, BlockEncoded)
        return encoded


class ScaledGrid(Grid):
    """ggml blocks with a float16 scale, and a float16 minimum in some formats."""

    def candidates(self, block_BN: Tensor) -> Scales:
        assert isinstance(self.format, GgmlFormat)
        if self.format.has_minimums:
            least_N, most_N = block_BN.amin(0), block_BN.amax(0)
            spread_N, middle_N = (most_N - least_N) / self.high, (most_N + least_N) / 2
            half_N = (most_N - least_N) / 2
            scale = torch.stack([spread_N * shrink for shrink in _SHRINKS])
            minimum = torch.stack([middle_N - half_N * shrink for shrink in _SHRINKS])
            return Scales(_half(scale), _half(minimum))
        if self.low == -self.high:  # codes on both sides alike
            largest_N = block_BN.abs().amax(0)
            return Scales(
                _half(torch.stack([largest_N / self.high * s for s in _SYMMETRIC_SHRINKS]))
            )
        largest_N = block_BN.gather(0, block_BN.abs().argmax(0, keepdim=True))[0]
        steps = [step * -self.low / 8.0 for step in _SIGNED_STEPS]
        return Scales(_half(torch.stack([largest_N / -step for step in steps])))

    def stored_scales(self, scale: Tensor) -> Tensor:
        """Round any scales to the format's."""
        return _half(scale)

    def encode(self, codes_RK: Tensor, scales_RM: Scales) -> Encoded:
        assert isinstance(self.format, GgmlFormat)
        minimums = scales_RM.minimum
        return ScaledEncoded(
            codes=(codes_RK + self.format.zero_point).to(self.format.code_dtype),
            scales=scales_RM.scale.half(),
            axis=-1,
            minimums=None if minimums is None else minimums.half(),
        )


class FloatCodeGrid(Grid):
    """MXFP4 and NVFP4 blocks. Codes are the values of 4-bit float codes."""

    def candidates(self, block_BN: Tensor) -> Scales:
        assert isinstance(self.format, ScaledCodes)
        largest_N = block_BN.abs().amax(0)
        if self.format.has_exponents:
            usual_N = self.format.usual_scale(largest_N)
            return Scales(torch.stack([usual_N, 2 * usual_N]))
        steps = [largest_N / step for step in _FLOAT_STEPS]
        return Scales(self.format.stored_scales(torch.stack(steps)))

    def codes(self, values: Tensor, scales: Scales) -> Tensor:
        inverse = scales.inverse if scales.inverse is not None else _reciprocal(scales.scale)
        return nearest_e2m1(values * inverse)

    def encode(self, codes_RK: Tensor, scales_RM: Scales) -> Encoded:
        assert isinstance(self.format, ScaledCodes)
        return ScaledEncoded(self.format.codes_of(codes_RK), scales_RM.scale.float(), -1)


def _reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, 0 for a zero scale."""
    return scale.reciprocal().masked_fill_(scale == 0, 0)


def _half(x: Tensor) -> Tensor:
    """Round to float16, within its range."""
    return x.clamp(-65504, 65504).half().float()


def grid_of(format_: DataFormat) -> Grid | None:
    """Return a block format's grid. None: nothing to choose."""
    if isinstance(format_, BlockFloat):
        most = (1 << format_.mantissa_bits) - 1
        return BlockFloatGrid(format_, -most, most)
    if isinstance(format_, GgmlFormat):
        if format_.has_minimums:
            return ScaledGrid(format_, 0, (1 << format_.element_bits) - 1)
        if format_.zero_point == 0:
            most = (1 << (format_.element_bits - 1)) - 1
            return ScaledGrid(format_, -most, most)
        return ScaledGrid(format_, -format_.zero_point, format_.zero_point - 1)
    if isinstance(format_, ScaledCodes) and format_.codebook == E2M1:
        return FloatCodeGrid(format_, -E2M1_LARGEST, E2M1_LARGEST)
    return None
