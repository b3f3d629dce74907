"""Memory mapping of a program's weight file.

Tensor sizes determine all offsets, and a header identifies the program. The contents are values
only: corrupt contents cannot redirect reads.
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
"""Number of rows in a weight panel."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The file's bytes and all tensor offsets."""

    data: np.ndarray
    offsets: tuple[int, ...]

    def address(self, index: int) -> int:
        """Return a tensor's memory address."""
        return int(self.data.ctypes.data) + self.offsets[index]


def whole(count: int, multiple: int) -> int:
    """Return the smallest multiple not below ``count``."""
    return -(-count // multiple) * multiple


def offsets_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the tensor offsets with these sizes in bytes, then the file size."""
    found, at = [], _HEADER.size
    for each in sizes:
        found.append(at)
        at += whole(each, _ALIGNMENT)
    return (*found, at)


def header(sizes: Sequence[int], digest: bytes) -> bytes:
    """Return the file's header. ``digest`` is the program's hash, 32 bytes."""
    return _HEADER.pack(_MAGIC, _VERSION, len(sizes), offsets_of(sizes)[-1], digest)


def map_weights(sizes: Sequence[int], digest: bytes, folder: Path) -> Mapped:
    """Map the weights for the program ``digest``, with tensors of these sizes in bytes.

    Raises:
        CheckpointError: The file has the wrong size or version, or belongs to another program.
    """
    path, offsets = folder / WEIGHTS, offsets_of(sizes)
    try:
        size = path.stat().st_size
        data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be mapped ({error})") from None
    if size < _HEADER.size or bytes(data[:8]) != _MAGIC:
        raise CheckpointError(f"{path}: not the weights of a native program; compile again")
    version = _HEADER.unpack(bytes(data[: _HEADER.size]))[1]
    if version != _VERSION:
        raise CheckpointError(f"{path}: version {version}; allowed: {_VERSION}; compile it again")
    if size != offsets[-1]:
        raise CheckpointError(f"{path}: {size} bytes; allowed: {offsets[-1]}; compile it again")
    if bytes(data[: _HEADER.size]) != header(sizes, digest):
        raise CheckpointError(f"{path}: the weights of another program; compile again")
    return Mapped(data, offsets[:-1])
