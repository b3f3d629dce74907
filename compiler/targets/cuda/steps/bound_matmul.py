"""A matmul with its weight and its kernels, bound at load."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.table import Ranges
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_bf16
from tilewright.compiler.targets.cuda.kernels.matmul.table import DENSE, SWIGLU
from tilewright.compiler.targets.cuda.weights.copies import DequantizedCopy
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.program.instructions import LinearOp


@dataclass(frozen=True, slots=True)
class BoundMatmul:
    """A matmul in one phase with all that is known at load.

    Attributes:
        each: The program's instruction.
        packed, bias, norm: Weight, bias, and the norm before the matmul with its epsilon.
        codes: e4m3 copy of the weight. None: there is none, or the fidelity does not permit it.
        values: bfloat16 copy of a weight in blocks. None: there is none.
        aligned, unaligned: Kernels by rows, with and without those that the copy engine feeds.
    """

    each: LinearOp
    packed: PackedWeight
    bias: Tensor | None
    norm: tuple[Tensor, float] | None
    codes: DequantizedCopy | None
    values: Tensor | None
    aligned: Ranges[str]
    unaligned: Ranges[str]

    def kernel(self, out: Tensor, x: Tensor) -> str:
        """Return the kernel for a result and an operand."""
        kernel = self.aligned.at(len(x))
        if kernel in (DENSE, SWIGLU) and self.norm is None and not gemm_bf16.has_room(x):
            return self.unaligned.at(len(x))
        if kernel == SWIGLU and not gemm_bf16.has_room(out):
            return self.unaligned.at(len(x))
        return kernel
