"""Runs a plan's small products of bfloat16, such as linear attention's gates where other weights
lie in blocks, along with the product before them that takes the same norm.
"""

from __future__ import annotations

import torch

from tilewright.compiler.targets.cuda.buffers import Buffers
from tilewright.compiler.targets.cuda.kernels import native, native_along
from tilewright.compiler.targets.cuda.readers import pairs_of
from tilewright.compiler.targets.cuda.weights import Weights, product_of, vector_of
from tilewright.compiler.targets.program.instructions import Linear, Plan


class Along:
    """A plan's pairs of products of one row, where the norm is inside of them. Capturable."""

    def __init__(self, plan: Plan, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._behind: dict[int, Linear] = {}  # by identity of what takes it along
        for each, behind in pairs_of(plan):
            pair = [weights.held(product_of(one)) for one in (each, behind)]
            if native_along.takes(*pair):
                self._behind[id(each)] = behind
        if self._behind and native_along.why_not(device):
            self._behind = {}
        self._made = {id(each) for each in self._behind.values()}

    def run(self, each: Linear, step: Buffers, num_rows: int) -> bool:
        """Whether a product of a decode step of so many rows is one of a pair, and then all that
        there is to do for it: the first of a pair makes both.
        """
        if num_rows > 1:
            return False
        behind = self._behind.get(id(each))
        if behind is not None:
            self._launch(each, behind, step)
        return behind is not None or id(each) in self._made

    def _launch(self, each: Linear, behind: Linear, step: Buffers) -> None:
        assert each.norm is not None
        bias = None
        if each.bias is not None:
            bias = self._weights.vector(vector_of(each.bias, is_paired=each.swiglu))
        small = native_along.Small(self._weights.held(product_of(behind)), step.view(behind.out))
        native_along.linear(
            step.view(each.out),
            step.view(each.x),
            self._weights.held(product_of(each)),
            small,
            epilogue=native.SWIGLU if each.swiglu else native.STORE,
            norm=(self._weights.vector(vector_of(each.norm)), each.eps),
            bias=bias,
        )
