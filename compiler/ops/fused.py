"""The fused dialect: one product with what may stand before and after it, for targets that run all
of it in one kernel. Passes make it of the plain op set; models never call it.

Legend: T tokens, C channels, O outputs (of the weight), P results: O, or O / 2 after SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor

from compiler.ops.dense import linear, rms_norm, swiglu_packed
from compiler.ops.library import Cost, operator


class FusedArguments(NamedTuple):
    """The arguments of :data:`fused_linear` by name; those of ``linear`` are the first three.

    It is itself what the fused op is called with. The first four and ``residual`` are tensors, or
    nodes of a graph.
    """

    x: Any
    weight: Any
    bias: Any = None
    norm_weight: Any = None
    eps: float = 0.0
    residual: Any = None
    swiglu: bool = False

    @classmethod
    def of(cls, args: Iterable[Any]) -> Self:
        """Those of a call of either op, however few it gives: ``FusedArguments.of(node.args)``."""
        return cls(*args)


def _fake(given: FusedArguments) -> Tensor:
    width = given.weight.shape[0] // 2 if given.swiglu else given.weight.shape[0]
    empty: Tensor = given.x.new_empty((*given.x.shape[:-1], width))
    return empty


def _cost(given: FusedArguments) -> Cost:
    """The product's; what is fused to it moves its own operands alone, and no results."""
    product = linear.cost(given.x, given.weight, given.bias)
    read = product.elements_read
    for extra in (given.norm_weight, given.residual):
        read += extra.numel() if extra is not None else 0
    written = product.elements_written // 2 if given.swiglu else product.elements_written
    return Cost(product.flops, read, written)


@operator(
    fake=lambda *args, **kwargs: _fake(FusedArguments(*args, **kwargs)),
    cost=lambda *args: _cost(FusedArguments.of(args)),
)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """``linear`` of ``x [T, C]`` by ``weight [O, C]``, ``bias [O]``, with its neighbours inside.

    Before it ``rms_norm(x, norm_weight [C], eps)`` where there is a ``norm_weight``; after it
    ``swiglu_packed`` where asked for, then ``residual [T, P]`` plus that. Returns ``[T, P]``.
    """
    if norm_weight is not None:
        x = rms_norm.reference(x, norm_weight, eps)
    y: Tensor = linear.reference(x, weight, bias)
    if swiglu:
        y = swiglu_packed.reference(y)
    return y if residual is None else residual + y
