"""The weights of a product where they lie: what both makers of the matrix unit's sums take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StridedWeight:
    """Weights in place: their storage's bits, where each matrix begins, steps along K and N.

    ``bits`` int16 ``[elements]``, ``offsets`` int64 ``[batches]``.
    """

    bits: Tensor
    offsets: Tensor
    step_k: int
    step_n: int
