"""Bit fields in ggml's blocks, for any block layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def scale_at(blocks: Bytes, at: int) -> Floats:
    """Return every block's float16 at byte ``at``, as float32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def signed(packed: Bytes) -> Floats:
    return packed.view(np.int8).astype(np.float32)


def fields(packed: Bytes, width: int, *, bits: int) -> Bytes:
    """Return all fields with ``bits`` bits, ``[blocks, bytes * 8 / bits]``.

    For every ``width`` bytes, the lowest fields come first, then the next fields.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = packed.reshape(packed.shape[0], -1, 1, width)
    fields: Bytes = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(packed.shape[0], -1)


def nibbles(packed: Bytes, width: int) -> Bytes:
    return fields(packed, width, bits=4)


def fifth_bits(packed: Bytes) -> Bytes:
    """Return bits ``[blocks, 32]`` with value 16 from bytes ``[blocks, 4]``, little-endian."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)
