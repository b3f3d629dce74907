"""What a number format is: its name, its size, and the way from float32 to storage and back.

Metadata need no torch; the methods that touch tensors import it. This file knows no target.
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
    """A tensor in block floating point; the blocked axis is the last one.

    ``exponents`` is uint8 ``[..., ceil(K / block)]`` (bias 127), ``mantissas`` int8 ``[..., K]``
    (signed magnitudes). ``axis`` is the position the blocked axis had before it was moved.
    """

    exponents: torch.Tensor
    mantissas: torch.Tensor
    axis: int


@dataclass(frozen=True, slots=True)
class ScaledEncoded:
    """A tensor of small integers with one float16 scale a block; the blocked axis is the last one.

    ``codes`` is uint8 or int8 ``[..., K]`` (which, and where zero lies, is the format's),
    ``scales`` float16 ``[..., ceil(K / block)]``, and ``minimums`` alike where the format adds one
    to every value of a block. ``axis`` is as in :class:`BlockEncoded`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    axis: int
    minimums: torch.Tensor | None = None


Encoded: TypeAlias = "torch.Tensor | BlockEncoded | ScaledEncoded"


@dataclass(frozen=True, slots=True)
class DataFormat(ABC):
    """One number format. ``block`` elements along an axis share an exponent or a scale (1: none).

    ``element_bits`` is what an element takes by itself, ``shared_bits`` what its block takes
    besides; ``bits`` includes both. A block is a whole number of bytes.
    """

    name: str
    element_bits: int
    block: int = 1
    shared_bits: int = 0

    @property
    def bits(self) -> float:
        """Bits per element, its part of the shared ones included (bfp8: 8.5)."""
        return self.element_bits + self.shared_bits / self.block

    @property
    def is_offered(self) -> bool:
        """Whether values can be quantised to it: not to what only files hold."""
        return True

    def nbytes(self, shape: Sequence[int], *, axis: int = -1) -> int:
        """Bytes of a packed tensor; a partial block along ``axis`` counts as a whole one."""
        num_elements = math.prod(shape)
        if self.block == 1 or num_elements == 0:
            return num_elements * self.element_bits // 8
        length = shape[axis]
        num_blocks = num_elements // length * -(-length // self.block)
        return num_blocks * (self.block * self.element_bits + self.shared_bits) // 8

    def check_nbytes(self, num_bytes: int, expected: int, shape: Sequence[int]) -> None:
        """Refuse packed data of the wrong size.

        Raises:
            CheckpointError: when ``num_bytes`` is not ``expected``.
        """
        if num_bytes != expected:
            raise CheckpointError(
                f"{num_bytes} bytes of {self.name} for shape {list(shape)}; allowed: {expected}"
            )

    @abstractmethod
    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> Encoded:
        """Encode a floating-point tensor of any shape, with blocks along ``axis``."""

    @abstractmethod
    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """The float32 values of ``encoded``, in the original shape."""

    @abstractmethod
    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Encode to flat storage: uint8 ``[nbytes(x.shape, axis=axis)]``."""

    @abstractmethod
    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """The float32 tensor of ``shape`` that :meth:`pack` stored in ``data``.

        Raises:
            CheckpointError: when ``data`` has not the size ``shape`` needs.
        """

    def round_trip(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """``x`` as this format holds it: float32, the shape of ``x``."""
        return self.dequantise(self.quantise(x, axis=axis))


FORMATS: Registry[DataFormat] = Registry("format")
