"""Scaled codes: small float codes with a scale per block of columns.

A value is the float32 product of a code's value and its block's scale. The scale of MXFP4 is its
exponent in a byte, with a bias of 127. Files with square blocks (128 x 128) have the same values
here: rows repeat the scale. Files with a second scale (NVFP4) have the same values, too: a block's
scale is the float32 result. File layouts are not defined here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.formats.base import DataFormat, Encoded, ScaledEncoded
from tilewright.errors import ConfigError

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""The largest e4m3 value."""
E2M1_LARGEST = 6.0
"""The largest value of 4-bit float codes."""
_EXPONENT_BITS, _EXPONENT_BIAS = 8, 127
_LARGEST_EXPONENT, _MIN_EXPONENT = 3, -126


@dataclass(frozen=True, slots=True)
class ScaledCodes(DataFormat):
    """Codes with a scale per block. A packed block is its scale, then its codes.

    Packed 4-bit codes are pairs. The first code is in the low nibble.

    Attributes:
        codebook: Values by code, for 4-bit codes. Empty: codes are e4m3.
    """

    codebook: tuple[float, ...] = ()

    @property
    def is_offered(self) -> bool:
        """Return whether a configuration can select it. Only a file selects normal-float codes."""
        return self.codebook in ((), E2M1)

    @property
    def has_exponents(self) -> bool:
        """Return whether scales are powers of two."""
        return self.shared_bits == _EXPONENT_BITS

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> ScaledEncoded:
        """Encode in blocks along ``axis``. The scale is :meth:`usual_scale`.

        Raises:
            ConfigError: The format is only read from files.
        """
        import torch

        from tilewright.compiler.formats.rows import as_rows, pad_blocks, row_chunks

        if not self.is_offered:
            raise ConfigError(
                f"{self.name}: nothing is quantized to it; allowed: only from a file, with "
                "precision stored"
            )
        moved = x.movedim(axis, -1)
        values = as_rows(moved)
        num_rows, length = values.shape
        num_blocks = -(-length // self.block)
        codes = torch.empty(num_rows, length, dtype=torch.uint8, device=x.device)
        scales = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x.device)
        for rows in row_chunks(values):
            blocks = pad_blocks(values[rows].float(), self.block).unflatten(-1, (-1, self.block))
            scales[rows] = self.usual_scale(blocks.abs().amax(-1))
            scaled = blocks / scales[rows].unsqueeze(-1)
            # Blocks of zeros have the scale 0. The tiny value scale is rounded down.
            scaled = scaled.masked_fill_(blocks == 0, 0)
            codes[rows] = self.codes_of(scaled).flatten(1)[:, :length]
        return ScaledEncoded(
            codes.view(moved.shape), scales.view(*moved.shape[:-1], num_blocks), axis
        )

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """Return float32 values in the original axis order."""

        from tilewright.compiler.formats.rows import pad_blocks

        assert isinstance(encoded, ScaledEncoded), f"{self.name} is encoded with scales"
        length = encoded.codes.shape[-1]
        values = pad_blocks(self.code_values(encoded.codes), self.block)
        values.unflatten(-1, (-1, self.block)).mul_(encoded.scales.unsqueeze(-1))
        return values[..., :length].contiguous().movedim(-1, encoded.axis)

    def usual_scale(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scale for a block's largest magnitude.

        The largest magnitude becomes 448 (e4m3), 4 to 8 (MXFP4), or about 6 (NVFP4). NVFP4's scale
        has a significand of 4 bits, as e4m3 scales with a second scale for the tensor.
        """
        import torch

        if not self.codebook:
            return largest / largest.new_tensor(LARGEST)
        if not self.has_exponents:
            return self.stored_scales(largest / E2M1_LARGEST)
        exponent = torch.frexp(largest).exponent - _LARGEST_EXPONENT
        scale = torch.ldexp(torch.ones_like(largest), exponent.clamp_(_MIN_EXPONENT, 127))
        return scale.masked_fill_(~largest.isfinite(), torch.inf)  # the block's values are NaN

    def stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Round NVFP4 scales to a significand of 4 bits."""
        import torch

        significand, exponent = torch.frexp(scales)
        return torch.ldexp((significand * 16).round_(), exponent - 4)

    def codes_of(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the nearest uint8 codes of values after scales."""
        import torch

        if not self.codebook:
            return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        values = nearest_e2m1(scaled)
        magnitudes = torch.tensor(_MAGNITUDES, device=scaled.device)
        codes = torch.searchsorted(magnitudes, values.abs().contiguous())
        return codes.add_((values < 0).long(), alpha=len(_MAGNITUDES)).to(torch.uint8)

    def code_values(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the float32 values of uint8 codes, before scales."""
        import torch

        if self.codebook:
            return torch.tensor(self.codebook, device=codes.device)[codes.long()]
        return codes.view(torch.float8_e4m3fn).float()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Return flat bytes, block after block along ``axis``."""
        return self.pack_encoded(self.quantise(x.movedim(axis, -1)))

    def pack_encoded(self, encoded: ScaledEncoded) -> torch.Tensor:
        """Return packed bytes. Zeros pad the last block along the last axis."""
        import torch

        from tilewright.compiler.formats.rows import pad_blocks

        codes = pad_blocks(encoded.codes, self.block).reshape(-1, self.block)
        if self.codebook:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        scales = encoded.scales.float().reshape(-1, 1)
        if self.has_exponents:
            scales = (scales.log2() + _EXPONENT_BIAS).clamp_(max=255).to(torch.uint8)
        scales = scales.view(torch.uint8)
        return torch.cat((scales, codes), dim=1).reshape(-1)

    def read(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> ScaledEncoded:
        """Return the codes and scales in packed bytes.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
        import torch

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = list(shape)
        moved.append(moved.pop(axis))
        num_blocks = -(-moved[-1] // self.block)
        blocks = data.reshape(-1, self.nbytes((self.block,)))
        scales, codes = blocks.tensor_split((self.shared_bits // 8,), dim=1)
        if self.has_exponents:
            scales = torch.exp2(scales.float() - _EXPONENT_BIAS)
        else:
            scales = scales.contiguous().view(torch.float32)
        if self.codebook:
            codes = torch.stack((codes & 0xF, codes >> 4), dim=-1)
        codes = codes.reshape(*moved[:-1], num_blocks * self.block)
        return ScaledEncoded(
            codes[..., : moved[-1]].contiguous(), scales.view(*moved[:-1], num_blocks), axis
        )

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """Return the float32 values of packed bytes.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
        return self.dequantise(self.read(data, shape, axis=axis))


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""Values of 4-bit float codes."""


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the values of 4-bit float codes, ties to even codes.

    Steps are 0.5 below 2, then 1, and 2 from 4.
    """
    magnitude = x.abs()
    step = (magnitude >= 2).to(x.dtype).mul_(0.5).add_(magnitude >= 4).add_(0.5)
    return (x / step).round_().mul_(step).clamp_(-E2M1_LARGEST, E2M1_LARGEST)


_NEGATIVE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
NF4_VALUES = (
    *(*_NEGATIVE, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""4-bit normal-float codes. They are not exact in bfloat16."""

FP8 = ScaledCodes("fp8", 8, 128, shared_bits=32)
MXFP4 = ScaledCodes("mxfp4", 4, 32, shared_bits=_EXPONENT_BITS, codebook=E2M1)
NVFP4 = ScaledCodes("nvfp4", 4, 16, shared_bits=32, codebook=E2M1)
NF4 = ScaledCodes("nf4", 4, 64, shared_bits=32, codebook=NF4_VALUES)
