"""A tile of packed weights in Triton as bfloat16, for programs with large tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import (
    BFP4_BYTES,
    BFP4_EXPONENTS,
    BFP8_BYTES,
    BFP8_EXPONENTS,
    MXFP4_BYTES,
    bfp4_nibbles,
    bfp4_values,
    bfp8_codes,
    bfp8_values,
    mxfp4_codes,
    mxfp4_values,
)


@triton.jit
def tile_columns(IS_BFP4: tl.constexpr):
    """int32 ``[128]``: a tile's columns in memory order.

    The order in bfp4 and mxfp4 is t, half, word.
    """
    column = tl.arange(0, 128)
    if IS_BFP4:
        column = column // 16 % 2 * 64 + column // 32 * 16 + column % 16
    return column


@triton.jit
def tile_weights(
    data_ptr, words_ptr, feature, step, num_row_tiles, STEPS: tl.constexpr, KIND: tl.constexpr
):
    """bfloat16 ``[rows, 128]``: tile ``step``, columns in the order of `tile_columns`."""
    # Rows past the last tile repeat it; they are not stored.
    tile = tl.minimum(feature // 16, num_row_tiles - 1).to(tl.int64)
    if KIND == "bf16":
        source = (tile * 16 + feature % 16) * (STEPS * 128) + step * 128
        weights = tl.load(data_ptr + source[:, None] + tl.arange(0, 128)[None, :])
    else:
        tile = tile * STEPS + step
        side, group, block = feature % 16 // 8, feature % 8, tl.arange(0, 8)[None, :]
        if KIND == "bfp8":
            source = tile * (BFP8_BYTES // 4) + side * 128 + group * 16
            word = tl.arange(0, 32)[None, :]
            words = tl.load(words_ptr + source[:, None] + word // 16 * 256 + word % 16)
            source = tile * BFP8_BYTES + BFP8_EXPONENTS + group * 16 + side
            exponents = tl.load(data_ptr + source[:, None] + block % 4 * 4 + block // 4 * 2)
            codes = bfp8_codes(words).reshape(feature.shape[0], 8, 16)
            values = bfp8_values(codes, exponents[:, :, None])
        elif KIND == "mxfp4":
            source = tile * (MXFP4_BYTES // 4) + side * 128 + group * 16
            words = tl.load(words_ptr + source[:, None] + tl.arange(0, 16)[None, :])
            source = tile * MXFP4_BYTES + 1024 + group * 8 + side
            exponents = tl.load(data_ptr + source[:, None] + block // 4 * 4 + block % 2 * 2)
            codes = mxfp4_codes(words).reshape(feature.shape[0], 8, 16)
            values = mxfp4_values(codes, exponents[:, :, None])
        else:
            source = tile * (BFP4_BYTES // 4) + side * 128 + group * 16
            words = tl.load(words_ptr + source[:, None] + tl.arange(0, 16)[None, :])
            source = tile * BFP4_BYTES + BFP4_EXPONENTS + group * 16 + side
            exponents = tl.load(data_ptr + source[:, None] + block * 2)
            nibbles = bfp4_nibbles(words).reshape(feature.shape[0], 8, 16)
            values = bfp4_values(nibbles, exponents[:, :, None])
        weights = values.to(tl.bfloat16).reshape(feature.shape[0], 128)
    return weights
