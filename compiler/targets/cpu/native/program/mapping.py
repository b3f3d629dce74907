"""A program's file of weights, mapped: where each tensor lies follows from the tensors' sizes; a
header says whose they are. Its bytes are values alone: whatever they are, nothing is found by them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.errors import CheckpointError

WEIGHTS = "weights.bin"
_MAGIC, _VERSION = b"TWNATIVE", 2
_HEADER = struct.Struct("<8sIIQ32s8x")
_ALIGNMENT = 64

LANES = 16
"""Rows of a panel of weights."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The file's bytes, and where in memory each tensor begins."""

    data: np.ndarray
    offsets: tuple[int, ...]

    def address(self, index: int) -> int:
        """The address in memory where a tensor begins."""
        return int(self.data.ctypes.data) + self.offsets[index]


def whole(count: int, multiple: int) -> int:
    """The least multiple that is not below ``count``."""
    return -(-count // multiple) * multiple


def offsets_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The offsets at which tensors of so many bytes lie in the file, and the file's size last."""
    found, at = [], _HEADER.size
    for each in sizes:
        found.append(at)
        at += whole(each, _ALIGNMENT)
    return (*found, at)


def header(sizes: Sequence[int], digest: bytes) -> bytes:
    """What the file begins with; ``digest``: the program's, 32 bytes."""
    return _HEADER.pack(_MAGIC, _VERSION, len(sizes), offsets_of(sizes)[-1], digest)


def map_weights(sizes: Sequence[int], digest: bytes, folder: Path) -> Mapped:
    """Map the weights of the program ``digest``, tensors of so many bytes.

    Raises:
        CheckpointError: for a file that is cut short, longer, of another version, or of another
            program.
    """
    path, offsets = folder / WEIGHTS, offsets_of(sizes)
    try:
        size = path.stat().st_size
        data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be mapped ({error})") from None
    if size < _HEADER.size or bytes(data[:8]) != _MAGIC:
        raise CheckpointError(f"{path}: not the weights of a native program; compile it again")
    version = _HEADER.unpack(bytes(data[: _HEADER.size]))[1]
    if version != _VERSION:
        raise CheckpointError(f"{path}: version {version}; allowed: {_VERSION}; compile it again")
    if size != offsets[-1]:
        raise CheckpointError(f"{path}: {size} bytes; allowed: {offsets[-1]}; compile it again")
    if bytes(data[: _HEADER.size]) != header(sizes, digest):
        raise CheckpointError(f"{path}: the weights of another program; compile it again")
    return Mapped(data, offsets[:-1])
