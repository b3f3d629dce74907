"""Operands of expert matmuls: the epilogue, the shared expert, and token and expert pairs in Triton
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class Finish:
    """Operations after a product's sums.

    Attributes:
        bias: Biases ``[E, O, 1]`` float32, or ``[E, 2 O, 1]`` with SwiGLU. None: none.
        limit: Bound of :func:`ops.dense.clamped_swiglu`. 0: plain SwiGLU.
        alpha: Factor of :func:`ops.dense.clamped_swiglu`.
    """

    bias: Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0

    def checked(self, num_rows: int, *, swiglu: bool) -> tuple[Tensor | None, float, float]:
        """Return the kernel arguments for ``num_rows`` over all experts."""
        assert self.bias is None or self.bias.numel() == num_rows * (1 + swiglu)
        assert swiglu or not self.limit
        return self.bias, self.limit, self.alpha


PLAIN = Finish()


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared expert, which all tokens use.

    Attributes:
        x: Inputs, bfloat16 ``[B, >= C]``.
        packed: Packed weight in the experts' format; see :func:`takes_shared`.
        out: Results. None for a sum.
    """

    x: Tensor
    packed: PackedWeight
    out: Tensor | None = None


def takes_shared(shared: PackedWeight, packed: PackedWeight) -> bool:
    """Return whether a shared expert's weight can run in the same launch."""
    is_alike = shared.kind == packed.format and shared.is_paired == packed.is_paired
    return is_alike and shared.num_columns % 8 == 0


class ExpertPairs(NamedTuple):
    """A tile's pairs of a token and an expert, in a kernel, ``[PAIRS]``."""

    token: Any
    choice: Any
    is_pair: Any


class ExpertOutput(NamedTuple):
    """The output in a kernel. ``choice_stride`` is the distance between a token's results."""

    ptr: Any
    stride: Any
    choice_stride: Any
    num_rows: Any


class ExpertEpilogue(NamedTuple):
    """The arguments of :class:`Finish` in a kernel."""

    bias_ptr: Any
    limit: Any
    alpha: Any


@triton.jit
def tile_of(tiles_ptr, num_tiles):
    """Return a program's expert, its first pair and its end, in pair order."""
    # Load all three at once, to pay the memory latency once.
    expert = tl.load(tiles_ptr + tl.program_id(1))
    first = tl.load(tiles_ptr + num_tiles + tl.program_id(1))
    last = tl.load(tiles_ptr + 2 * num_tiles + tl.program_id(1))
    return expert, first, last


@triton.jit
def pairs_at(order_ptr, index, last, top_k):
    """Return the pairs at some indices before ``last``."""
    is_pair = index < last
    pair = tl.load(order_ptr + index, mask=is_pair, other=0)
    return ExpertPairs((pair // top_k).to(tl.int64), pair % top_k, is_pair)


@triton.jit
def _swiglu(
    sums,
    first_feature,
    num_rows,
    epilogue,
    expert,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Return the SwiGLU of gate and up rows, ``[ROWS / 2, PAIRS]``, and its output rows."""
    # Permute row 16 p + 8 s + g to [p, g, pair, s]: gate and up become neighbors.
    sides = tl.permute(sums.reshape(ROWS // 16, 2, 8, PAIRS), (0, 2, 3, 1))
    gate, up = tl.split(sides)
    feature = first_feature // 2 + tl.arange(0, ROWS // 2)
    gate, up = gate.reshape(ROWS // 2, PAIRS), up.reshape(ROWS // 2, PAIRS)
    if epilogue.bias_ptr is not None:
        inside, bias = feature < num_rows, epilogue.bias_ptr + expert * num_rows * 2
        gate += tl.load(bias + feature, mask=inside, other=0.0)[:, None]
        up += tl.load(bias + num_rows + feature, mask=inside, other=0.0)[:, None]
    if CLAMPED:
        limit = epilogue.limit
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = gate * tl.sigmoid(gate * epilogue.alpha) * (up + 1.0)
    else:
        y = gate * tl.sigmoid(gate) * up
    return y, feature


@triton.jit
def store_pairs(
    out,
    sums,
    pairs,
    first_feature,
    epilogue,
    expert,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Store ``sums [ROWS, PAIRS]`` from ``first_feature``, or the SwiGLU of their gate and
    up.

    The bias has the rows of all experts. An expert's gate rows precede its up rows.
    """
    if SWIGLU:
        y, feature = _swiglu(
            sums, first_feature, out.num_rows, epilogue, expert, ROWS, PAIRS, CLAMPED
        )
    else:
        y = sums
        feature = first_feature + tl.arange(0, ROWS)
        if epilogue.bias_ptr is not None:
            bias = epilogue.bias_ptr + expert * out.num_rows
            y += tl.load(bias + feature, mask=feature < out.num_rows, other=0.0)[:, None]
    target = out.ptr + pairs.token[None, :] * out.stride
    target = target + pairs.choice[None, :] * out.choice_stride + feature[:, None]
    y = rounded(y, out.ptr.dtype.element_ty, CHAINED)
    tl.store(target, y, mask=(feature < out.num_rows)[:, None] & pairs.is_pair[None, :])
