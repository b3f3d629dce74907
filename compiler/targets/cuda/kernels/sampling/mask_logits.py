"""Removes forbidden tokens from logits before sampling."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import cdiv

_CHUNK = 4096  # logits per program


@triton.jit(do_not_specialize=["width", "logits_stride", "words_stride"])
def _forbid_kernel(
    logits_ptr, rows_ptr, words_ptr, width, logits_stride, words_stride, BLOCK: tl.constexpr
):
    """Write minus infinity to the logits of tokens without a bit. Others are unchanged."""
    mask, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + mask)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    words = tl.load(words_ptr + mask * words_stride + token // 32, mask=inside, other=-1)
    is_forbidden = inside & (((words >> (token % 32)) & 1) == 0)
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=is_forbidden)


def forbid(logits: Tensor, rows: Tensor, words: Tensor, *, width: int) -> None:
    """Write minus infinity to the logits of forbidden tokens.

    Args:
        logits: ``[B, V]`` float32, changed.
        rows: ``[M]`` int64, different rows of the logits.
        words: ``[M, >= width / 32]`` int32, as in `targets.interface.token_masks`.
        width: number of tokens in a row that sampling reads. Later logits are unchanged.
    """
    num_masks = len(rows)
    assert words.shape[0] == num_masks and 32 * words.shape[1] >= width <= logits.shape[1]
    assert logits.stride(1) == words.stride(1) == 1
    if num_masks:
        _forbid_kernel[(num_masks, cdiv(width, _CHUNK))](
            logits, rows, words, width, logits.stride(0), words.stride(0), BLOCK=_CHUNK
        )
