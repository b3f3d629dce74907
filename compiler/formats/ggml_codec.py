"""The arithmetic of ggml's blocks of 32, on float32 rows: the same operations in the same order.

It knows no names, files or memory layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilewright.compiler.formats.rows import pad_blocks, row_chunks

BLOCK = 32

# Blocks float32 [N, 32] to codes [N, 32], float16 scales [N, 1], and minimums alike or None.
BlockEncoder = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"]
Encoded = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def encode_around_zero(blocks: torch.Tensor, half: int) -> Encoded:
    """uint8 codes 0 to 2 * half - 1: the value of the largest magnitude becomes 0, that is -half
    scales.
    """
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = largest / -half
    shifted = (blocks * _inverse(scales)).add_(half + 0.5)
    return _integers(shifted.trunc_(), torch.uint8, 0, 2 * half - 1), scales.half(), None


def encode_from_minimum(blocks: torch.Tensor, most: int) -> Encoded:
    """uint8 codes 0 to ``most``, counted from the least value of the block, its minimum."""
    # Which of -0 and 0 is less is left open: 0, with which every value is the same.
    minimums = blocks.amin(dim=1, keepdim=True).add_(0.0)
    spread = blocks.amax(dim=1, keepdim=True) - minimums
    # A divisor on the same device: torch turns division by a number into a product on some.
    scales = spread / blocks.new_tensor(most)
    shifted = ((blocks - minimums) * _inverse(scales)).add_(0.5)
    return _integers(shifted.trunc_(), torch.uint8, 0, most), scales.half(), minimums.half()


def encode_q80(blocks: torch.Tensor) -> Encoded:
    """int8 codes -127 to 127, rounded half away from zero."""
    scales = blocks.abs().amax(dim=1, keepdim=True) / blocks.new_tensor(127)
    exact = blocks * _inverse(scales)
    magnitudes = exact.abs()
    whole = magnitudes.floor()
    whole += (magnitudes - whole).mul_(2).floor_()
    return _integers(whole.copysign_(exact), torch.int8, -127, 127), scales.half(), None


ENCODERS: dict[str, BlockEncoder] = {
    "q40": partial(encode_around_zero, half=8),
    "q41": partial(encode_from_minimum, most=15),
    "q50": partial(encode_around_zero, half=16),
    "q51": partial(encode_from_minimum, most=31),
    "q80": encode_q80,
}
"""The encoder of each format, by the format's name."""


def encode_rows(
    x_RK: torch.Tensor, encoder: BlockEncoder, dtype: torch.dtype, *, has_minimums: bool
) -> Encoded:
    """Run an encoder over rows of any length, chunk by chunk.

    Returns codes ``[R, K]`` of ``dtype`` and scales float16 ``[R, ceil(K/32)]``, minimums alike
    where ``has_minimums``; a trailing partial block is encoded as if padded with zeros.
    """
    num_rows, length = x_RK.shape
    codes = x_RK.new_empty(num_rows, length, dtype=dtype)
    scales = x_RK.new_empty(num_rows, -(-length // BLOCK), dtype=torch.float16)
    minimums = torch.empty_like(scales) if has_minimums else None
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK)
        encoded, chunk_scales, chunk_minimums = encoder(chunk.reshape(-1, BLOCK))
        codes[rows] = encoded.view(chunk.shape)[:, :length]
        scales[rows] = chunk_scales.view(chunk.shape[0], -1)
        if minimums is not None and chunk_minimums is not None:
            minimums[rows] = chunk_minimums.view(chunk.shape[0], -1)
    return codes, scales, minimums


def decode_rows(
    codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, zero_point: int
) -> torch.Tensor:
    """float32 ``[R, K]``: (code - zero point) * scale, and the minimum added where there is one,
    chunk by chunk.
    """
    num_rows, length = codes.shape
    values = codes.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(codes[rows].float().sub_(zero_point), BLOCK)
        chunk = chunk.view(chunk.shape[0], -1, BLOCK) * scales[rows].float().unsqueeze(-1)
        if minimums is not None:
            chunk += minimums[rows].float().unsqueeze(-1)
        values[rows] = chunk.flatten(1)[:, :length]
    return values


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale before that is rounded to float16; 0 where there is nothing but zeros."""
    return scales.reciprocal().masked_fill_(scales == 0, 0)


def _integers(x: torch.Tensor, dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    # What C leaves open, the integer of an inf or a NaN, is 0: as x86 has it.
    return x.nan_to_num_(0, 0, 0).clamp_(low, high).to(dtype)
