"""Arithmetic of ggml's small blocks on float32 rows, with ggml's operations in ggml's order.

Names, files and memory layouts are not defined here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilewright.compiler.formats.rows import pad_blocks, row_chunks

BLOCK = 32

# Encode float32 blocks [N, 32]. Return codes [N, 32], float16 scales [N, 1], and float16 minimums
# [N, 1] or None.
BlockEncoder = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"]
Encoded = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def encode_around_zero(blocks: torch.Tensor, half: int) -> Encoded:
    """Encode to unsigned codes below ``2 * half``. The value with the largest magnitude gets the
    code zero.
    """
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = largest / -half
    shifted = (blocks * _inverse(scales)).add_(half + 0.5)
    return _integers(shifted.trunc_(), torch.uint8, 0, 2 * half - 1), scales.half(), None


def encode_from_minimum(blocks: torch.Tensor, most: int) -> Encoded:
    """Encode to unsigned codes up to ``most``, relative to the smallest value in the block."""
    # The order of -0 and 0 is undefined. Adding 0 makes the minimum 0, and all values stay the
    # same.
    minimums = blocks.amin(dim=1, keepdim=True).add_(0.0)
    spread = blocks.amax(dim=1, keepdim=True) - minimums
    # Divide by a tensor: some devices replace division by a Python number with multiplication.
    scales = spread / blocks.new_tensor(most)
    shifted = ((blocks - minimums) * _inverse(scales)).add_(0.5)
    return _integers(shifted.trunc_(), torch.uint8, 0, most), scales.half(), minimums.half()


def encode_q80(blocks: torch.Tensor) -> Encoded:
    """Encode to signed codes from -127 to 127, rounding ties away from zero."""
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
"""Encoder by format name."""


def encode_rows(
    x_RK: torch.Tensor, encoder: BlockEncoder, dtype: torch.dtype, *, has_minimums: bool
) -> Encoded:
    """Run an encoder over rows of any length, chunk by chunk.

    Zeros pad a partial last block. Return codes ``[R, K]`` with this dtype, float16 scales
    ``[R, ceil(K/32)]``, and float16 minimums in the same shape if ``has_minimums``.
    """
    num_rows, length = x_RK.shape
    codes = x_RK.new_empty(num_rows, length, dtype=dtype)
    scales = x_RK.new_empty(num_rows, -(-length // BLOCK), dtype=torch.float16)
    minimums = torch.empty_like(scales) if has_minimums else None
    for rows in row_chunks(x_RK):
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
    """Return float32 ``[R, K]``: ``(code - zero point) * scale + minimum``, chunk by chunk."""
    num_rows, length = codes.shape
    values = codes.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(codes):
        chunk = pad_blocks(codes[rows].float().sub_(zero_point), BLOCK)
        chunk = chunk.view(chunk.shape[0], -1, BLOCK) * scales[rows].float().unsqueeze(-1)
        if minimums is not None:
            chunk += minimums[rows].float().unsqueeze(-1)
        values[rows] = chunk.flatten(1)[:, :length]
    return values


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """Return the scale reciprocal before float16 rounding. Blocks of zeros give zero."""
    return scales.reciprocal().masked_fill_(scales == 0, 0)


def _integers(x: torch.Tensor, dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    # C leaves the integer of inf and NaN undefined. Use 0, as x86 does.
    return x.nan_to_num_(0, 0, 0).clamp_(low, high).to(dtype)
