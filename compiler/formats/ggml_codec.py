"""The arithmetic of ggml's Q4_0 and Q8_0, on float32 rows: the same operations in the same order.

It knows no names, files or memory layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.compiler.formats.rows import pad_blocks, row_chunks

BLOCK = 32

# Blocks float32 [N, 32] to codes [N, 32] and float16 scales [N, 1].
BlockEncoder = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]


def encode_q40(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes 0 to 15: the value of the largest magnitude becomes 0, that is -8 scales."""
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = largest / -8
    shifted = (blocks * _inverse(scales)).add_(8.5)
    return _integers(shifted.trunc_(), torch.uint8, 0, 15), scales.half()


def encode_q80(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes -127 to 127, rounded half away from zero."""
    # A divisor on the same device: torch turns division by a number into a product on some.
    scales = blocks.abs().amax(dim=1, keepdim=True) / blocks.new_tensor(127)
    exact = blocks * _inverse(scales)
    magnitudes = exact.abs()
    whole = magnitudes.floor()
    whole += (magnitudes - whole).mul_(2).floor_()
    return _integers(whole.copysign_(exact), torch.int8, -127, 127), scales.half()


def encode_rows(
    x_RK: torch.Tensor, encoder: BlockEncoder, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an encoder over rows of any length, chunk by chunk.

    Returns codes ``[R, K]`` of ``dtype`` and scales float16 ``[R, ceil(K/32)]``; a trailing partial
    block is encoded as if padded with zeros.
    """
    num_rows, length = x_RK.shape
    codes = x_RK.new_empty(num_rows, length, dtype=dtype)
    scales = x_RK.new_empty(num_rows, -(-length // BLOCK), dtype=torch.float16)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK)
        encoded, chunk_scales = encoder(chunk.reshape(-1, BLOCK))
        codes[rows] = encoded.view(chunk.shape)[:, :length]
        scales[rows] = chunk_scales.view(chunk.shape[0], -1)
    return codes, scales


def decode_rows(codes: torch.Tensor, scales: torch.Tensor, zero_point: int) -> torch.Tensor:
    """float32 ``[R, K]``: (code - zero point) * scale, chunk by chunk."""
    num_rows, length = codes.shape
    values = codes.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(codes[rows].float().sub_(zero_point), BLOCK)
        chunk = chunk.view(chunk.shape[0], -1, BLOCK) * scales[rows].float().unsqueeze(-1)
        values[rows] = chunk.flatten(1)[:, :length]
    return values


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale before that is rounded to float16; 0 where there is nothing but zeros."""
    return scales.reciprocal().masked_fill_(scales == 0, 0)


def _integers(x: torch.Tensor, dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    # What C leaves open, the integer of an inf or a NaN, is 0: as x86 has it.
    return x.nan_to_num_(0, 0, 0).clamp_(low, high).to(dtype)
