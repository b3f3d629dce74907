"""ggml's block layouts as float32, by the operations of ``gguf.quants`` in their order.

It knows the bytes inside a block; which tensor they belong to, and where it stands, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Blocks are decoded in pieces of about this many values, so that temporaries stay in cache.
CHUNK_VALUES = 1 << 17

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoder = Callable[[Bytes], Floats]

SIZES: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Values and bytes of a block, by ggml's name of the type."""


def dequantise(stored: Bytes, dtype: str) -> Tensor:
    """The flat tensor of the bytes of whole blocks: floats as they are stored, else float32."""
    flat = stored.reshape(-1)
    if dtype == "F32":
        return torch.from_numpy(flat.view("<f4"))
    if dtype == "F16":
        return torch.from_numpy(flat.view("<f2"))
    if dtype == "BF16":
        return torch.from_numpy(flat.view("<i2")).view(torch.bfloat16)
    decode, (block, block_bytes) = DECODERS[dtype], SIZES[dtype]
    blocks = flat.reshape(-1, block_bytes)
    values = np.empty((blocks.shape[0], block), np.float32)
    step = CHUNK_VALUES // block
    # A corrupt scale may be inf or NaN: the values then are too, as the reference's.
    with np.errstate(all="ignore"):
        for start in range(0, blocks.shape[0], step):
            values[start : start + step] = decode(blocks[start : start + step])
    return torch.from_numpy(values.reshape(-1))


def _q8_0(blocks: Bytes) -> Floats:
    return _signed(blocks[:, 2:]) * _scale(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8)) * _scale(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 4:], 16).astype(np.float32)
    return quants * _scale(blocks, 0) + _scale(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return (quants.astype(np.float32) - np.float32(16)) * _scale(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return quants.astype(np.float32) * _scale(blocks, 0) + _scale(blocks, 2)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minimums = _k_scales(blocks)
    quants = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    return (quants.astype(np.float32) * scales - minimums).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minimums = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    # Bit i of the 32 bytes is the fifth bit of the i-th group of 32 values.
    high = _fields(blocks[:, 16:48], 32, bits=1).reshape(-1, 8, 32)
    quants = low | high << np.uint8(4)
    return (quants.astype(np.float32) * scales - minimums).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128], 64)
    high = _fields(blocks[:, 128:192], 32, bits=2)
    quants = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = _scale(blocks, 208) * _signed(blocks[:, 192:208])
    return (quants.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


DECODERS: Mapping[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _scale(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _signed(packed: Bytes) -> Floats:
    return packed.view(np.int8).astype(np.float32)


def _fields(packed: Bytes, width: int, *, bits: int) -> Bytes:
    """Every byte's ``bits``-wide fields, ``[blocks, bytes * 8 / bits]``.

    Bytes are taken ``width`` at a time: the lowest field of all of them, then the next one.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = packed.reshape(packed.shape[0], -1, 1, width)
    fields: Bytes = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(packed.shape[0], -1)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    return _fields(packed, width, bits=4)


def _fifth_bits(packed: Bytes) -> Bytes:
    """``[blocks, 4]`` bytes to ``[blocks, 32]``: bit i, little-endian, in the place of 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums ``[blocks, 8, 1]`` of Q4_K and Q5_K, times the block's own two.

    Of the 12 bytes after those, groups 0 to 3 have their six bits low in bytes 0 to 3 (minimums:
    4 to 7); groups 4 to 7 have four bits in bytes 8 to 11 (low nibble; minimums: high nibble) and
    the two above them on top of bytes 0 to 3 (4 to 7).
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    mask, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([first & mask, low & 0x0F | first >> 2 & top], axis=1)
    minimums = np.concatenate([second & mask, low >> 4 | second >> 2 & top], axis=1)
    return (
        (_scale(blocks, 0) * scales.astype(np.float32))[:, :, None],
        (_scale(blocks, 2) * minimums.astype(np.float32))[:, :, None],
    )
