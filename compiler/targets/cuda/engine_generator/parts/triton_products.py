"""Products of few rows in Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import CHOICES
from tilewright.compiler.targets.cuda.engine_generator.parts.kernels import power, product_kernel
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound

INSIDE, APART = "inside", "apart"
"""Ways of a product: with the norm inside, or behind it."""


class TritonProducts:
    """Every weight is read once, by one of many programs, for up to 16 rows."""

    def ways(self, each: Bound, num_rows: int) -> tuple[str, ...]:
        """Those there are, the likeliest first."""
        if num_rows > 16:
            return ()
        return (INSIDE,) if each.norm is None else (INSIDE, APART)

    def run(self, of: Any, way: str, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        """What `Linear` says; ``of``: whose product it is."""
        weight, norm = each.weight, each.norm if way == INSIDE else None
        assert weight is not None
        if norm is None and each.norm is not None:
            x = of.normed(each, x)
        outputs, width = weight.shape[0] // (2 if each.does.swiglu else 1), x.shape[1]
        out = x.new_empty(len(x), outputs) if residual is None else residual
        rows = 1 if len(x) == 1 else max(8, 1 << (len(x) - 1).bit_length())
        block = CHOICES.one_outputs if rows == 1 else CHOICES.outputs
        columns = CHOICES.columns * 16 // max(16, rows)
        if width <= max(columns, CHOICES.whole):
            columns = power(width)
        of.launch(
            product_kernel,
            (-(-outputs // block),),
            *(out, x, weight, weight if norm is None else norm),
            *(len(x), outputs, of.settings.eps),
            WIDTH=width,
            ROWS=rows,
            OUTPUTS=block,
            COLUMNS=columns,
            PARTS=min(CHOICES.parts, columns // 16),
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            SWIGLU=each.does.swiglu,
            num_warps=CHOICES.warps,
        )
        return out
