"""The plain float formats fp32, bf16 and fp16, each a torch dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.formats.base import BlockEncoded, DataFormat, Encoded, ScaledEncoded

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FloatFormat(DataFormat):
    """A format with a torch dtype. Conversion rounds to nearest, ties to even."""

    dtype_name: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Return the torch dtype of encoded tensors."""
        import torch

        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Round ``x`` to this dtype. ``axis`` has no effect."""
        return x.to(self.dtype)

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """Convert encoded values to float32. The conversion is exact."""
        assert not isinstance(encoded, BlockEncoded | ScaledEncoded), f"{self.name} has no blocks"
        return encoded.float()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Pack ``x`` into bytes: row-major, little-endian, rounded to this format."""
        import torch

        return self.quantise(x).contiguous().reshape(-1).view(torch.uint8)

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """Return the float32 values of packed bytes.

        Raises:
            CheckpointError: The size of ``data`` does not match ``shape``.
        """
        self.check_nbytes(data.numel(), self.nbytes(shape), shape)
        # The clone is aligned. A slice of a file may not be.
        return data.reshape(-1).clone().view(self.dtype).reshape(tuple(shape)).float()


FP32 = FloatFormat("fp32", 32, dtype_name="float32")
BF16 = FloatFormat("bf16", 16, dtype_name="bfloat16")
FP16 = FloatFormat("fp16", 16, dtype_name="float16")
