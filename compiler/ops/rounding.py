"""The rounding operator for matmul inputs with a block format."""

from __future__ import annotations

from torch import Tensor

from tilewright.compiler.formats import get_format
from tilewright.compiler.ops.library import Cost, like, operator


def _cost(x: Tensor) -> Cost:
    count = x.numel()
    return Cost(4.0 * count, count, count)


@operator(fake=like, cost=_cost)
def round_q80(x: Tensor) -> Tensor:
    """Round ``x [..., C]`` to q80 values: integers times a float16 scale per block along C.

    Return the rounded values in the shape and type of ``x``.
    """
    return get_format("q80").round_trip(x).to(x.dtype)
