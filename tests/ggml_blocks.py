"""Random blocks of ggml's types, and what the format library makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from tilewright.compiler.formats.ggml_blocks import SIZES

# Where a block has its float16 numbers; every other byte of a block may be anything.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(dtype: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes, with scales of both signs from 2**-10 to 2**-5, so that all values are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, SIZES[dtype][1]), dtype=np.uint8)
    for at in SCALES_AT[dtype]:
        sign = rng.choice([-1.0, 1.0], (num_blocks, 1))
        scales = sign * np.exp2(rng.uniform(-10, -5, (num_blocks, 1)))
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
    return blocks


def library_values(blocks: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal words, the sign of zero included, but for what kind of NaN a NaN is."""
    values = got.numpy().reshape(expected.shape)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert np.array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
