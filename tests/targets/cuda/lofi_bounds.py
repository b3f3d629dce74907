"""Error bounds for matmuls of e4m3 operands on a Hopper GPU.

An instruction adds 32 exact products to a sum. All are aligned to the largest and truncated to 13
bits. Each loses less than a unit, 2 ** -13 of the largest. After 128 columns, sums continue in
float32 without this loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT, _COLUMNS, _INSTRUCTIONS = 13, 32, 4


def check_sums(
    found_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, *, bias: Tensor | None = None
) -> None:
    """Check that ``found`` is ``x weight^T + bias`` within the unit's error.

    The bound per sum is the worst case. The bound over all sums is a unit per instruction, for
    independent errors. A single wrong sign exceeds it.
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
