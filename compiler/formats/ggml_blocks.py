"""Decoders of ggml's block layouts to float32.

The operations and their order are the same as in ``gguf.quants``. Tensor names and file offsets are
not defined here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.formats.ggml_bits import (
    Bytes,
    Floats,
    fields,
    fifth_bits,
    nibbles,
    scale_at,
    signed,
)
from tilewright.compiler.formats.ggml_grid_blocks import GRID_DECODERS
from tilewright.compiler.formats.ggml_small_blocks import LARGER, SMALL_DECODERS, scales_iq4_xs

# Value count per decoded chunk: temporaries stay in the processor cache.
CHUNK_VALUES = 1 << 17

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
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
}
"""Number of values and bytes in a block, by ggml's type name."""


def dequantise(stored: Bytes, dtype: str) -> Tensor:
    """Decode the bytes of whole blocks to a flat tensor. Float types keep their dtype."""
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
    # Corrupt scales can be inf or NaN. The values are then inf or NaN, as in the reference.
    with np.errstate(all="ignore"):
        for start in range(0, blocks.shape[0], step):
            values[start : start + step] = decode(blocks[start : start + step])
    return torch.from_numpy(values.reshape(-1))


def larger_blocks(stored: Bytes, dtype: str) -> tuple[str, Bytes]:
    """Convert rows of whole blocks to a larger type with equal values.

    Return the name of the type and the bytes. A type with its own format is unchanged.
    """
    if dtype not in LARGER:
        return dtype, stored
    name, convert = LARGER[dtype]
    blocks = convert(stored.reshape(-1, SIZES[dtype][1]))
    return name, blocks.reshape(stored.shape[0], -1)


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """Fields in rows of K-quant blocks, in file order, ``n`` blocks each.

    Attributes:
        codes: uint8 ``[rows, 256 n]``, unsigned.
        scales: A scale per column group. uint8 ``[rows, 8 n]``, but int8 in IQ4_XS,
            and int8 ``[rows, 16 n]`` in Q6_K.
        minimums: uint8 ``[rows, 8 n]``. None in Q6_K and IQ4_XS.
        factors: A float16 factor per block for its scales, ``[rows, n]``. With minimums ``[rows, 2
            n]``:
            the second factor is for the minimums.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    factors: Tensor


def super_blocks(stored: Bytes, dtype: str) -> SuperBlocks:
    """Return the fields of Q4_K, Q5_K, Q6_K or IQ4_XS. ``stored`` is uint8 ``[rows, bytes]``."""
    num_rows = stored.shape[0]
    blocks = stored.reshape(-1, SIZES[dtype][1])

    def rows_of(part: Bytes) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(part).reshape(num_rows, -1))

    if dtype == "Q6_K":
        return SuperBlocks(
            codes=rows_of(_codes_6_k(blocks)),
            scales=rows_of(blocks[:, 192:208]).view(torch.int8),
            minimums=None,
            factors=rows_of(blocks[:, 208:210]).view(torch.float16),
        )
    if dtype == "IQ4_XS":
        return SuperBlocks(
            codes=rows_of(nibbles(blocks[:, 8:], 16)),
            scales=rows_of(scales_iq4_xs(blocks).view(np.uint8)).view(torch.int8),
            minimums=None,
            factors=rows_of(blocks[:, :2]).view(torch.float16),
        )
    scales, minimums = _k_scales(blocks)
    codes = _codes_4_k(blocks) if dtype == "Q4_K" else _codes_5_k(blocks)
    return SuperBlocks(
        codes=rows_of(codes),
        scales=rows_of(scales),
        minimums=rows_of(minimums),
        factors=rows_of(blocks[:, :4]).view(torch.float16),
    )


def _q8_0(blocks: Bytes) -> Floats:
    return signed(blocks[:, 2:]) * scale_at(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    return (nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8)) * scale_at(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 4:], 16).astype(np.float32)
    return quants * scale_at(blocks, 0) + scale_at(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6])
    return (quants.astype(np.float32) - np.float32(16)) * scale_at(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    quants = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8])
    return quants.astype(np.float32) * scale_at(blocks, 0) + scale_at(blocks, 2)


def _q4_k(blocks: Bytes) -> Floats:
    return _from_minimums(blocks, _codes_4_k(blocks))


def _q5_k(blocks: Bytes) -> Floats:
    return _from_minimums(blocks, _codes_5_k(blocks))


def _from_minimums(blocks: Bytes, codes: Bytes) -> Floats:
    """Decode Q4_K or Q5_K blocks. A block has eight groups, each with a scale and a minimum."""
    scales, minimums = _k_scales(blocks)
    factor, least = scale_at(blocks, 0), scale_at(blocks, 2)
    quants = codes.reshape(-1, 8, 32).astype(np.float32)
    own = quants * (factor * scales.astype(np.float32))[:, :, None]
    values: Floats = own - (least * minimums.astype(np.float32))[:, :, None]
    return values.reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    quants = _codes_6_k(blocks).astype(np.float32) - np.float32(32)
    scales = scale_at(blocks, 208) * signed(blocks[:, 192:208])
    return (quants.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _codes_4_k(blocks: Bytes) -> Bytes:
    return nibbles(blocks[:, 16:], 32)


def _codes_5_k(blocks: Bytes) -> Bytes:
    # Bit i of the bytes is the fifth bit for value group i.
    return nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, bits=1) << np.uint8(4)


def _codes_6_k(blocks: Bytes) -> Bytes:
    low, high = nibbles(blocks[:, :128], 64), fields(blocks[:, 128:192], 32, bits=2)
    return low | high << np.uint8(4)


DECODERS: Mapping[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    **SMALL_DECODERS,
    **GRID_DECODERS,
}


def _k_scales(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return the 6-bit scales and minimums ``[blocks, 8]`` of Q4_K and Q5_K.

    They follow the block's own factors in twelve bytes:

    - Bytes 0 to 3 have the scales for groups 0 to 3 in their low six bits. Their top two bits are
      the high bits for groups 4 to 7.
    - Bytes 4 to 7 have the minimums in the same layout.
    - Bytes 8 to 11 have the low four bits for groups 4 to 7: scales in low nibbles, minimums in
      high nibbles.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    mask, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([first & mask, low & 0x0F | first >> 2 & top], axis=1)
    minimums = np.concatenate([second & mask, low >> 4 | second >> 2 & top], axis=1)
    return scales, minimums
