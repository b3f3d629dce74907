"""Norms by kernel. Excludes norms with a matmul as their only reader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, Gpu, Ranges
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rms_norm, rms_norm_heads
from tilewright.compiler.targets.cuda.kernels.elementwise.table import (
    CPP,
    EACH_HEAD,
    INSIDE,
    TRITON,
    NormSite,
    bind_heads,
    bind_norm,
)
from tilewright.compiler.targets.cuda.kernels.matmul import gemv, norm_linear_triton
from tilewright.compiler.targets.cuda.steps.buffers import Buffers, is_aligned
from tilewright.compiler.targets.cuda.steps.matmul import MatmulOps, epilogue_of
from tilewright.compiler.targets.cuda.steps.plan_readers import norms_before
from tilewright.compiler.targets.cuda.weights.stream import Weights, product_of
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    KernelProgram,
    LinearOp,
    NormHeads,
    NormOp,
)


@dataclass(frozen=True, slots=True)
class _Phases:
    """Kernels by number of rows, for decode and prefill."""

    decode: Ranges[str]
    prompt: Ranges[str]

    def at(self, num_rows: int, *, decodes: bool) -> str:
        """Return the kernel for a number of rows."""
        return (self.decode if decodes else self.prompt).at(num_rows)


class Norms:
    """All norms with their weights. CUDA graphs can capture them.

    Decode bits do not depend on the batch.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        products: MatmulOps,
        *,
        gpu: Gpu,
        arithmetic: str,
    ) -> None:
        self._weights = weights
        self._is_cpp = is_cpp = gpu.has_cpp and arithmetic != EXACT
        self._before: dict[int, NormOp] = {}  # by identity of the next matmul
        for norm, reader in norms_before(plan):
            packed = weights.packed(product_of(reader))
            if is_cpp:
                takes = gemv.leaves_norm(packed) and products.takes_small_m(reader)
            else:
                takes = reader.bias is None and norm_linear_triton.takes(packed)
            if takes:
                self._before[id(reader)] = norm
        inside = {id(norm) for norm in self._before.values()}
        self._norms: dict[int, _Phases] = {}
        for each in plan.instructions:
            if isinstance(each, NormOp):
                site = partial(
                    NormSite,
                    arithmetic,
                    gpu,
                    fits=is_cpp and _fits(plan, each),
                    is_inside=id(each) in inside,
                )
                kernels = (bind_norm(site(decodes=decodes)) for decodes in (True, False))
                self._norms[id(each)] = _Phases(*kernels)
        sites = (NormSite(arithmetic, gpu, decodes=decodes) for decodes in (True, False))
        self._heads = _Phases(*map(bind_heads, sites))

    def run(self, each: NormOp, step: Buffers, *, decodes: bool) -> None:
        """Run a norm unless the next matmul computes it; see :meth:`run_product`."""
        out, x = step.view(each.out), step.view(each.x)
        weight = self._weights.constant(each.weight)
        kernel = self._norms[id(each)].at(len(x), decodes=decodes)
        if kernel == TRITON:
            rms_norm(out, x, weight, eps=each.eps)
        elif kernel == CPP:
            gemv.rms_norm(out, x, weight, eps=each.eps, num_tokens=len(x))

    def run_heads(self, each: NormHeads, step: Buffers, *, decodes: bool) -> None:
        """Run the query and key head norms."""
        weights = [self._weights.constant(norm) for norm in (each.q_norm, each.k_norm)]
        out, qkv = step.view(each.out), step.view(each.qkv)
        is_alone = self._heads.at(len(qkv), decodes=decodes) == EACH_HEAD
        rms_norm_heads(out, qkv, *weights, num_heads=each.num_heads, eps=each.eps, alone=is_alone)

    def run_product(self, each: LinearOp, step: Buffers, num_rows: int) -> bool:
        """Run a decode matmul with the norm before it. Return false if both are separate."""
        norm = self._before.get(id(each))
        if norm is None or self._norms[id(norm)].at(num_rows, decodes=True) != INSIDE:
            return False
        out, x, normed = map(step.view, (each.out, norm.x, norm.out))
        packed, weight = self._weights.weight_of(each), self._weights.constant(norm.weight)
        if not self._is_cpp:
            norm_linear_triton.norm_linear(out, normed, x, packed, weight, eps=norm.eps)
            return True
        gemv.linear(
            out,
            x,
            packed,
            epilogue=epilogue_of(each),
            num_tokens=1,
            bias=self._weights.bias_of(each),
            norm=(weight, norm.eps),
            normed=normed,
        )
        return True


def _fits(program: KernelProgram, norm: NormOp) -> bool:
    """Return whether gemv.cu normalizes these rows: fours of float32, to bfloat16."""
    roles = [program.buffers[view.buffer].role for view in (norm.out, norm.x)]
    are_types = roles[0] == OPERAND != roles[1]
    are_aligned = is_aligned(program, norm.out, 4) and is_aligned(program, norm.x, 4)
    return are_types and are_aligned and gemv.takes_norm(norm.x.width)
