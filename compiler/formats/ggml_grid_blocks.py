"""ggml's IQ blocks with grids as float32, by the operations in ``gguf.quants``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright.compiler.formats.ggml_bits import Bytes, Floats, fields, scale_at
from tilewright.compiler.formats.ggml_grids import grid_of

_HALF, _DELTA = np.float32(0.5), np.float32(0.125)
_SEVEN = np.arange(128, dtype=np.uint8)
_PARITY = np.bitwise_xor.reduce(np.unpackbits(_SEVEN[:, None], axis=1), axis=1)
_SIGNS = _SEVEN | _PARITY << np.uint8(7)
"""Eight signs with an even count, by the first seven."""


def _words(blocks: Bytes, start: int, stop: int, kind: str) -> npt.NDArray[np.uint32]:
    """Return little-endian words in bytes ``[start, stop)``."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind).astype(np.uint32)


def _signed(values: Floats, signs: Bytes) -> Floats:
    """Negate values ``[..., 8 n]`` if a bit in ``signs`` is set, bit by bit."""
    bits = np.unpackbits(np.ascontiguousarray(signs), axis=-1, bitorder="little")
    return values * np.where(bits.reshape(values.shape) == 0, np.float32(1), np.float32(-1))


def _scaled(factors: Floats, values: Floats, signs: Bytes) -> Floats:
    """Multiply groups with their factors, then with signs."""
    rows = values.reshape(len(values), factors.shape[1], -1) * factors[:, :, None]
    return _signed(rows.reshape(len(values), 256), signs.reshape(len(values), 32))


def _grid(name: str, codes: npt.NDArray[Any]) -> Floats:
    return grid_of(name)[codes].reshape(len(codes), 256)


def _seven_bit_signs(words: npt.NDArray[np.uint32]) -> Bytes:
    shifts = np.array([0, 7, 14, 21], np.uint32)
    return _SIGNS[words[:, :, None] >> shifts & np.uint32(0x7F)]


def _iq2_xxs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    codes = np.ascontiguousarray(words[:, :, 0]).view(np.uint8).astype(np.uint32)
    last = words[:, :, 1]
    shares = _HALF + (last >> 28).astype(np.float32)
    factors = scale_at(blocks, 0) * shares * np.float32(0.25)
    return _scaled(factors, _grid("IQ2_XXS", codes), _seven_bit_signs(last))


def _iq2_xs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 66, "<u2")
    shares = _HALF + fields(blocks[:, 66:74], 1, bits=4).astype(np.float32)
    factors = scale_at(blocks, 0) * shares * np.float32(0.25)
    return _scaled(factors, _grid("IQ2_XS", words & 511), _SIGNS[words >> 9])


def _iq2_s(blocks: Bytes) -> Floats:
    high = fields(blocks[:, 66:74], 1, bits=2).astype(np.uint32)
    codes = blocks[:, 2:34].astype(np.uint32) | high << 8
    shares = _HALF + fields(blocks[:, 74:82], 1, bits=4).astype(np.float32)
    factors = scale_at(blocks, 0) * shares * np.float32(0.25)
    return _scaled(factors, _grid("IQ2_S", codes), blocks[:, 34:66])


def _iq3_xxs(blocks: Bytes) -> Floats:
    last = _words(blocks, 66, 98, "<u4")
    factors = scale_at(blocks, 0) * (_HALF + (last >> 28).astype(np.float32)) * _HALF
    codes = blocks[:, 2:66].astype(np.uint32)
    return _scaled(factors, _grid("IQ3_XXS", codes), _seven_bit_signs(last))


def _iq3_s(blocks: Bytes) -> Floats:
    high = fields(blocks[:, 66:74], 1, bits=1).astype(np.uint32)
    codes = blocks[:, 2:66].astype(np.uint32) | high << 8
    shares = fields(blocks[:, 106:110], 1, bits=4).astype(np.float32)
    factors = scale_at(blocks, 0) * (np.float32(2) * shares + np.float32(1))
    return _scaled(factors, _grid("IQ3_S", codes), blocks[:, 74:106])


def _iq1_s(blocks: Bytes) -> Floats:
    """Decode IQ1_S. Groups share a scale, a sign of the offset, and high bits of four codes."""
    last = _words(blocks, 34, 50, "<u2")
    factors = scale_at(blocks, 0) * (2 * (last >> 12 & 7) + 1).astype(np.float32)
    offsets = np.where(last & 0x8000, -_DELTA, _DELTA).astype(np.float32)
    high = last[:, :, None] >> np.array([0, 3, 6, 9], np.uint32) & np.uint32(7)
    codes = blocks[:, 2:34].astype(np.uint32) | high.reshape(-1, 32) << 8
    values = _grid("IQ1_S", codes).reshape(-1, 8, 32) + offsets[:, :, None]
    return (factors[:, :, None] * values).reshape(-1, 256)


def _iq1_m(blocks: Bytes) -> Floats:
    """Decode IQ1_M. The scale is in the high nibbles of four words with the group scales."""
    words = _words(blocks, 48, 56, "<u2")
    shifts = np.array([12, 8, 4, 0], np.uint32)
    whole = np.bitwise_or.reduce((words & 0xF000) >> shifts, axis=1)
    scale = whole.astype(np.uint16).view(np.float16).astype(np.float32)[:, None]
    shares = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint32) & np.uint32(7)
    factors = scale * (2 * shares.reshape(-1, 16) + 1).astype(np.float32)
    last = fields(blocks[:, 32:48], 1, bits=4).astype(np.uint32)
    codes = blocks[:, :32].astype(np.uint32) | (last & 7) << 8
    offsets = np.where(last & 8, -_DELTA, _DELTA).astype(np.float32)
    values = _grid("IQ1_S", codes).reshape(-1, 32, 8) + offsets[:, :, None]
    return (factors[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)


GRID_DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
"""Decoders by ggml's name for the type."""
