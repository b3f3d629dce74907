"""Bit fields in the bytes of ggml's blocks. Knows no block layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def scale_at(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def signed(packed: Bytes) -> Floats:
    return packed.view(np.int8).astype(np.float32)


def fields(packed: Bytes, width: int, *, bits: int) -> Bytes:
    """Return the fields of ``bits`` bits of every byte, ``[blocks, bytes * 8 / bits]``.

    Bytes are taken ``width`` at a time: first the lowest field of all of them, then the next field.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = packed.reshape(packed.shape[0], -1, 1, width)
    fields: Bytes = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(packed.shape[0], -1)


def nibbles(packed: Bytes, width: int) -> Bytes:
    return fields(packed, width, bits=4)


def fifth_bits(packed: Bytes) -> Bytes:
    """``[blocks, 4]`` bytes to ``[blocks, 32]``: bit i, little-endian, in the place of 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)
