"""What a product of e4m3 operands may lose in the matrix unit of a Hopper GPU.

An instruction adds 32 exact products to a sum: all are laid beside the largest of them, and what
is more than 13 bits behind its first bit is cut off, so that each of the 33 loses less than a unit,
2 ** -13 of the largest. Every 128 columns the sum goes on in float32, where nothing of that size
is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT, _COLUMNS, _INSTRUCTIONS = 13, 32, 4


def check_sums(
    found_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, bias: Tensor | None = None
) -> None:
    """``found`` is ``x weight^T + bias``, but for what the unit may lose: at most what all terms of
    all instructions may, and over all sums no more than a unit for each instruction, as if these
    were independent. A single wrong sign breaks that.
    """
    terms = x_MK.double()[:, None] * weight_NK.double()[None]
    wanted = terms.sum(-1)
    parts = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % (_COLUMNS * _INSTRUCTIONS)))
    parts = parts.unflatten(-1, (-1, _INSTRUCTIONS, _COLUMNS))
    sums = parts.sum(-1).cumsum(-1).abs().flatten(2).amax(-1)
    largest = torch.maximum(sums, terms.abs().amax(-1))
    unit = largest.clamp(min=2.0**-120) * 2.0**-_KEPT
    count = -(-terms.shape[-1] // _COLUMNS)
    wanted = wanted if bias is None else wanted + bias
    lost = (found_MN.double() - wanted).abs() / unit
    assert lost.max() <= (_COLUMNS + 1) * count, f"{lost.max()} units of {count} instructions"
    assert lost.square().mean() <= count, f"{lost.square().mean().sqrt()} units in the mean"
