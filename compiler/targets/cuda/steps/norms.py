"""Runs a plan's norms that no product asks for: in decode steps of one row inside of the product
right behind, a router's of bfloat16, which leaves the norm where others that read it look for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, Gpu
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rms_norm
from tilewright.compiler.targets.cuda.kernels.matmul import linear as native
from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.cuda.steps.matmul import Products, epilogue_of
from tilewright.compiler.targets.cuda.steps.plan_readers import norms_before
from tilewright.compiler.targets.cuda.weights.stream import Weights, product_of
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp, NormOp


class Norms:
    """A plan's norms with their weights. Capturable in a CUDA graph.

    In CUDA C++ a row of a decode step has the same bits in every batch.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        products: Products,
        *,
        gpu: Gpu,
        arithmetic: str,
    ) -> None:
        self._weights = weights
        self._before: dict[int, NormOp] = {}  # by identity of the product that makes it
        self._is_native = gpu.has_cpp and arithmetic != EXACT
        if self._is_native:
            self._before = {
                id(each): norm
                for norm, each in norms_before(plan)
                if native.leaves_norm(weights.held(product_of(each))) and products.takes_few(each)
            }
        self._made = {id(norm) for norm in self._before.values()}

    def run(self, each: NormOp, step: Buffers, *, decodes: bool) -> None:
        """Make a norm, where that is not left to :meth:`run_product`."""
        out, x = step.view(each.out), step.view(each.x)
        weight = self._weights.constant(each.weight)
        if not (decodes and self._is_native and _is_plain(out, x)):
            rms_norm(out, x, weight, eps=each.eps)
        elif len(x) > 1 or id(each) not in self._made:
            native.rms_norm(out, x, weight, eps=each.eps, num_tokens=len(x))

    def run_product(self, each: LinearOp, step: Buffers, num_rows: int) -> bool:
        """Whether a product of a decode step makes the norm before it, and then both."""
        norm = self._before.get(id(each)) if num_rows == 1 else None
        if norm is None:
            return False
        normed, x = step.view(norm.out), step.view(norm.x)
        if not _is_plain(normed, x):
            return False
        native.linear(
            step.view(each.out),
            x,
            self._weights.weight_of(each),
            epilogue=epilogue_of(each),
            num_tokens=1,
            bias=self._weights.bias_of(each),
            norm=(self._weights.constant(norm.weight), norm.eps),
            normed=normed,
        )
        return True


def _is_plain(out: Tensor, x: Tensor) -> bool:
    """Whether linear.cu's norm takes such rows: whole fours of float32, made bfloat16."""
    is_whole = all(
        each.data_ptr() % (4 * each.itemsize) == 0 == each.stride(0) % 4 for each in (out, x)
    )
    are_types = (out.dtype, x.dtype) == (torch.bfloat16, torch.float32)
    return is_whole and are_types and native.takes_norm(x.shape[1])
