"""ggml's small blocks as float32, and larger blocks with equal values.

The operations are those of ``gguf.quants``, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tilewright.compiler.formats.ggml_bits import (
    Bytes,
    Floats,
    fields,
    nibbles,
    scale_at,
)

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)

DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    """Sixteen groups: a scale in the low nibble, a minimum in the high nibble."""
    codes = fields(blocks[:, 16:80], 32, bits=2).reshape(-1, 16, 16).astype(np.float32)
    scales = scale_at(blocks, 80) * (blocks[:, :16] & 0x0F).astype(np.float32)
    minimums = scale_at(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    values: Floats = codes * scales[:, :, None] - minimums[:, :, None]
    return values.reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    codes = _codes_3_k(blocks).astype(np.float32) - np.float32(4)
    scales = scale_at(blocks, 108) * _scales_3_k(blocks).astype(np.float32)
    return (codes.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _codes_3_k(blocks: Bytes) -> Bytes:
    """Unsigned codes. Bit i in the mask is the high bit for group i."""
    low, high = fields(blocks[:, 32:96], 32, bits=2), fields(blocks[:, :32], 32, bits=1)
    return low | high << np.uint8(2)


def _scales_3_k(blocks: Bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """Signed scales: low bits in eight bytes, high bits in the next four."""
    low, high = nibbles(blocks[:, 96:104], 8), fields(blocks[:, 104:108], 4, bits=2)
    return (low | high << np.uint8(4)).view(np.int8) - np.int8(32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return IQ4_VALUES[nibbles(blocks[:, 2:], 16)].astype(np.float32) * scale_at(blocks, 0)


def scales_iq4_xs(blocks: Bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """Return signed scales: the low bits in nibbles, the high bits in the second word."""
    high = fields(blocks[:, 2:4], 1, bits=2)
    low = fields(blocks[:, 4:8], 1, bits=4)
    return (low | high << np.uint8(4)).view(np.int8) - np.int8(32)


def _iq4_xs(blocks: Bytes) -> Floats:
    scales = scales_iq4_xs(blocks)
    values = IQ4_VALUES[nibbles(blocks[:, 8:], 16)].astype(np.float32).reshape(-1, 8, 32)
    factors = scale_at(blocks, 0) * scales.astype(np.float32)
    return (values * factors[:, :, None]).reshape(-1, 256)


def _tq1_0(blocks: Bytes) -> Floats:
    return (_ternary_1(blocks) - np.float32(1)) * scale_at(blocks, 52)


def _ternary_1(blocks: Bytes) -> Floats:
    """Unpack ternary digits, the first digit in a byte first."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = (
        blocks[:, None, :32] * powers,
        blocks[:, None, 32:48] * powers,
        blocks[:, None, 48:52] * powers[:4],
    )
    joined = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)
    return (joined.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.float32)


def _tq2_0(blocks: Bytes) -> Floats:
    codes = fields(blocks[:, :64], 32, bits=2).astype(np.float32)
    return (codes - np.float32(1)) * scale_at(blocks, 64)


def _mxfp4(blocks: Bytes) -> Floats:
    """Doubled values, and half the scale."""
    halves = np.exp2(blocks[:, :1].astype(np.float32) - np.float32(128))
    return halves * DOUBLED_E2M1[nibbles(blocks[:, 1:], 16)]


def _nvfp4(blocks: Bytes) -> Floats:
    """Decode NVFP4: groups with an unsigned e4m3 scale. A NaN scale is zero."""
    exponents, mantissas = blocks[:, :4] >> np.uint8(3) & np.uint8(15), blocks[:, :4] & np.uint8(7)
    is_normal = exponents > 0
    whole = np.where(is_normal, np.float32(1), np.float32(0)) + mantissas / np.float32(8)
    powers = np.exp2(np.maximum(exponents, 1).astype(np.float32) - np.float32(8))
    scales = np.where(blocks[:, :4] == 0x7F, np.float32(0), whole * powers).astype(np.float32)
    codes = nibbles(blocks[:, 4:].reshape(-1, 8), 8).reshape(-1, 4, 16)
    return (scales[:, :, None] * DOUBLED_E2M1[codes]).reshape(-1, 64)


SMALL_DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
"""Decoders by ggml's name of the type."""


def _as_q6_k(blocks: Bytes) -> Bytes:
    """Q3_K as Q6_K: equal factor and scales, codes around 32."""
    codes = _codes_3_k(blocks) + np.uint8(28)
    low, high = codes & np.uint8(0x0F), codes >> np.uint8(4)
    pairs = low.reshape(-1, 2, 2, 64)
    quads = high.reshape(-1, 2, 4, 32)
    parts = (
        (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, 128),
        _packed(quads, bits=2).reshape(-1, 64),
        _scales_3_k(blocks).view(np.uint8),
        blocks[:, 108:110],
    )
    return np.concatenate(parts, axis=1)


def _as_q8_0(blocks: Bytes) -> Bytes:
    """IQ4_NL as Q8_0: the table's values as codes."""
    codes = IQ4_VALUES[nibbles(blocks[:, 2:], 16)].view(np.uint8)
    return np.concatenate((blocks[:, :2], codes), axis=1)


def _as_q4_0(blocks: Bytes) -> Bytes:
    """Ternary blocks as Q4_0, with repeated scales."""
    is_first = blocks.shape[1] == 54
    digits = _ternary_1(blocks) if is_first else fields(blocks[:, :64], 32, bits=2)
    codes = (digits.astype(np.uint8) + np.uint8(7)).reshape(-1, 8, 2, 16)
    packed = codes[:, :, 0] | codes[:, :, 1] << np.uint8(4)
    scales = np.repeat(blocks[:, None, -2:], 8, axis=1)
    joined: Bytes = np.concatenate((scales, packed), axis=2).reshape(len(blocks), -1)
    return joined


def _packed(codes: Bytes, *, bits: int) -> Bytes:
    """Pack the second last axis into fields of bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes << shifts, axis=-2)
    return packed


LARGER: Mapping[str, tuple[str, Callable[[Bytes], Bytes]]] = {
    "Q3_K": ("Q6_K", _as_q6_k),
    "IQ4_NL": ("Q8_0", _as_q8_0),
    "TQ1_0": ("Q4_0", _as_q4_0),
    "TQ2_0": ("Q4_0", _as_q4_0),
}
"""The type whose blocks have the same values bit for bit, and its bytes, by ggml's name."""
