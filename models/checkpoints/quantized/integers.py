"""Integer weights: codes around a zero, and a scale per column group.

Knows no file layout. A scheme gives codes and scales for rows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import QuantizedTensor, Read

BLOCK = 32
BLOCKS: dict[str, tuple[int, int]] = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""ggml's blocks with a scale, and their range of codes."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight's rows.

    Attributes:
        codes: int16 ``[rows, columns]``, zero already subtracted.
        scales: float32 ``[rows, groups]``.
        groups: Group index by column. None: groups of equal size, in order.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor | None = None


class IntegerTensor(QuantizedTensor):
    """A weight with integer codes.

    Attributes:
        bits: Bits per code.
        group: Columns per group.
    """

    bits: int
    group: int

    @abstractmethod
    def codes(self, read: Read, start: int, stop: int) -> Codes:
        """Return rows ``[start, stop)``."""

    @abstractmethod
    def is_symmetric(self, read: Read) -> bool:
        """Return whether the zero is the middle code everywhere."""

    @property
    def scale_name(self) -> str:
        """Return the tensor name for the scales."""
        return self.names[1]

    def scales_are_half(self, read: Read) -> bool:
        """Return whether every scale is exact in float16."""
        return are_half(read(self.scale_name, ()))

    def has_order(self, read: Read) -> bool:
        """Return whether a group has columns that are not adjacent."""
        return False

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        found = self.codes(read, start, stop)
        self._check(found.scales)
        groups = found.groups
        if groups is None:
            groups = torch.arange(self.shape[1]) // self.group
        return found.codes.float() * found.scales[:, groups]

    def stored_type(self, read: Read) -> str:
        zeros = "" if self.is_symmetric(read) else " with zeros"
        name = f"{self.label} int{self.bits}{zeros}"
        if self.has_order(read):
            return f"{name}, act-order"
        if self.group % BLOCK or self.shape[1] % BLOCK:
            return f"{name}, groups of {self.group}"
        return name if self.scales_are_half(read) else f"{name}, wide scales"

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        found = self.codes(read, start, stop)
        self._check(found.scales)
        kind = block_type(self.bits, is_symmetric=self.is_symmetric(read))
        assert kind is not None and found.groups is None
        return kind, torch.from_numpy(pack_blocks(found, self.group, kind))

    def _check(self, scales: Tensor) -> None:
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"tensor {self.scale_name} has a scale that is inf or NaN; allowed: finite scales"
            )


def block_type(bits: int, *, is_symmetric: bool) -> str | None:
    """Return ggml's smallest block type with every code, if any."""
    least = -(1 << (bits - 1)) if is_symmetric else 1 - (1 << bits)
    most = (1 << (bits - 1)) - 1 if is_symmetric else (1 << bits) - 1
    fit = [name for name, (low, high) in BLOCKS.items() if low <= least and most <= high]
    return fit[0] if fit else None


def pack_blocks(found: Codes, group: int, kind: str) -> npt.NDArray[np.uint8]:
    """Return rows as ggml's blocks: a float16 scale, then codes."""
    rows, columns = found.codes.shape
    codes = found.codes.numpy().reshape(-1, BLOCK)
    low, high = BLOCKS[kind]
    assert not codes.size or low <= codes.min() <= codes.max() <= high
    scales = found.scales.half().repeat_interleave(group // BLOCK, dim=1)
    scales = scales[:, : columns // BLOCK].contiguous()
    parts = [scales.numpy().reshape(-1, 1).view(np.uint8)]
    if kind == "Q8_0":
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        unsigned: npt.NDArray[np.uint8] = (codes - low).astype(np.uint8)
        if kind == "Q5_0":
            parts.append(np.packbits(unsigned >> np.uint8(4), axis=1, bitorder="little"))
        nibbles = unsigned & np.uint8(0x0F)
        parts.append((nibbles[:, :16] | nibbles[:, 16:] << np.uint8(4)).astype(np.uint8))
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` fields per row. A row is a little-endian bit stream in int32 words."""
    stream = words.contiguous().numpy().view(np.uint8).reshape(words.shape[0], -1)
    if bits == 8:
        return torch.from_numpy(stream[:, :count].astype(np.int16))
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        split = stream[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
        return torch.from_numpy(split.reshape(len(stream), -1)[:, :count].astype(np.int16))
    flat = np.unpackbits(stream, axis=1, bitorder="little")[:, : count * bits]
    weights = (1 << np.arange(bits)).astype(np.int16)
    return torch.from_numpy(flat.reshape(len(stream), count, bits).astype(np.int16) @ weights)


def are_half(scales: Tensor) -> bool:
    """Return whether every scale is exact in float16."""
    return scales.dtype == torch.float16 or bool((scales.half().float() == scales.float()).all())
