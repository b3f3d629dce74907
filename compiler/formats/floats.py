"""The plain IEEE-like formats: fp32, bf16, fp16, each one torch dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.formats.base import BlockEncoded, DataFormat, Encoded, ScaledEncoded

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FloatFormat(DataFormat):
    """A format that torch holds as a dtype; conversion rounds to nearest, ties to even."""

    dtype_name: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the encoded tensor."""
        import torch

        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Round ``x`` to this dtype; ``axis``, accepted for uniformity, has no meaning here."""
        return x.to(self.dtype)

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """Turn encoded values into float32, which holds each of them exactly."""
        assert not isinstance(encoded, BlockEncoded | ScaledEncoded), f"{self.name} has no blocks"
        return encoded.float()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Pack ``x`` into bytes: row-major, little-endian, rounded to this format."""
        import torch

        return self.quantise(x).contiguous().reshape(-1).view(torch.uint8)

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """The inverse of :meth:`pack`, as float32; refuses data of another size."""
        self.check_nbytes(data.numel(), self.nbytes(shape), shape)
        # A slice of a file need not start at a multiple of the element size; a clone does.
        return data.reshape(-1).clone().view(self.dtype).reshape(tuple(shape)).float()


FP32 = FloatFormat("fp32", 32, dtype_name="float32")
BF16 = FloatFormat("bf16", 16, dtype_name="bfloat16")
FP16 = FloatFormat("fp16", 16, dtype_name="float16")
