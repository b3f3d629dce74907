"""Base class for number formats: name, size, and conversion from float32 to storage and back.

Metadata need no torch. Methods on tensors import torch. No target is imported here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tilewright.errors import CheckpointError
from tilewright.utils.registry import Registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BlockEncoded:
    """A tensor in block floating point. The blocked axis is last.

    Attributes:
        exponents: uint8 ``[..., ceil(K / block)]`` with bias 127.
        mantissas: int8 ``[..., K]``, signed magnitudes.
        axis: Original position of the blocked axis.
    """

    exponents: torch.Tensor
    mantissas: torch.Tensor
    axis: int


@dataclass(frozen=True, slots=True)
class ScaledEncoded:
    """A tensor of small codes with a scale per block. The blocked axis is last.

    Attributes:
        codes: uint8 or int8 ``[..., K]``. The format defines the dtype and the values.
        scales: float16 or float32 ``[..., ceil(K / block)]``.
        axis: Original position of the blocked axis.
        minimums: float16 ``[..., ceil(K / block)]``, added to every value. None: no minimums.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    axis: int
    minimums: torch.Tensor | None = None


Encoded: TypeAlias = "torch.Tensor | BlockEncoded | ScaledEncoded"


@dataclass(frozen=True, slots=True)
class DataFormat(ABC):
    """A number format.

    Attributes:
        name: Name in configurations.
        element_bits: Bits per element, without the shared bits.
        block: Element count with a common exponent or scale. 1: nothing is shared.
        shared_bits: Additional bits per block. A block is a whole byte count.
    """

    name: str
    element_bits: int
    block: int = 1
    shared_bits: int = 0

    @property
    def bits(self) -> float:
        """Return the bits per element, with the shared bits (bfp8: 8.5)."""
        return self.element_bits + self.shared_bits / self.block

    @property
    def is_offered(self) -> bool:
        """Return whether a configuration can select this format. False for file formats."""
        return True

    def nbytes(self, shape: Sequence[int], *, axis: int = -1) -> int:
        """Return a packed tensor's size in bytes. A partial block along ``axis`` counts as
        whole.
        """
        num_elements = math.prod(shape)
        if self.block == 1 or num_elements == 0:
            return num_elements * self.element_bits // 8
        length = shape[axis]
        num_blocks = num_elements // length * -(-length // self.block)
        return num_blocks * (self.block * self.element_bits + self.shared_bits) // 8

    def check_nbytes(self, num_bytes: int, expected: int, shape: Sequence[int]) -> None:
        """Raise CheckpointError unless packed data have the expected size in bytes."""
        if num_bytes != expected:
            raise CheckpointError(
                f"{num_bytes} bytes of {self.name} for shape {list(shape)}; allowed: {expected}"
            )

    @abstractmethod
    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> Encoded:
        """Encode a float tensor with any shape, in blocks along ``axis``."""

    @abstractmethod
    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """Return the float32 values of ``encoded``, in the original shape."""

    @abstractmethod
    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Encode to flat storage, uint8 ``[nbytes(x.shape, axis=axis)]``."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """Return the float32 tensor of ``shape`` from the bytes of :meth:`pack`.

        Raises:
            CheckpointError: The size of ``data`` does not match ``shape``.
        """

    def round_trip(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Quantize and dequantize ``x``. Return float32 values with its shape."""
        return self.dequantise(self.quantise(x, axis=axis))


FORMATS: Registry[DataFormat] = Registry("format")
