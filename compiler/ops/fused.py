"""Fused matmuls for targets with a kernel for the whole op. Passes create them, models never do.

Legend: T tokens, C channels, O weight outputs, P results (O, or O / 2 after SwiGLU), K experts per
token, H value heads, V value size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor

from tilewright.compiler.ops.delta_rule import gated_delta_rule_step
from tilewright.compiler.ops.dense import (
    clamped_swiglu,
    linear,
    rms_norm,
    sigmoid_gate,
    swiglu,
    swiglu_packed,
)
from tilewright.compiler.ops.library import Cost, operator
from tilewright.compiler.ops.moe import expert_linear


class FusedArguments(NamedTuple):
    """Named arguments for :data:`fused_linear`. The first three are the arguments for ``linear``.

    The tuple is itself the argument list. The first four and ``residual`` are tensors or graph
    nodes.
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
        """Name the arguments of a ``linear`` or ``fused_linear`` call, with defaults.

        Example: ``FusedArguments.of(node.args)``.
        """
        return cls(*args)


def _fake(given: FusedArguments) -> Tensor:
    width = given.weight.shape[0] // 2 if given.swiglu else given.weight.shape[0]
    empty: Tensor = given.x.new_empty((*given.x.shape[:-1], width))
    return empty


def _cost(given: FusedArguments) -> Cost:
    """Return the matmul's cost plus the fused operands. Fused operations write no intermediate
    results.
    """
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
    """Multiply ``x [T, C]`` by ``weight [O, C]`` and add ``bias [O]``, with fused neighbors.

    Before the matmul apply ``rms_norm(x, norm_weight [C], eps)`` if ``norm_weight`` is given. After
    it apply ``swiglu_packed`` if ``swiglu``, then add ``residual [T, P]``. Return ``[T, P]``.
    """
    if norm_weight is not None:
        x = rms_norm.reference(x, norm_weight, eps)
    y: Tensor = linear.reference(x, weight, bias)
    if swiglu:
        y = swiglu_packed.reference(y)
    return y if residual is None else residual + y


class FusedExpertArguments(NamedTuple):
    """Named arguments for :data:`fused_expert_linear`. The first four and ``bias`` are those for
    ``expert_linear``.

    All except ``swiglu``, ``limit`` and ``alpha`` are tensors or graph nodes.
    """

    x: Any
    weight: Any
    experts: Any
    weights: Any = None
    swiglu: bool = False
    residual: Any = None
    shared: Any = None
    shared_gate: Any = None
    bias: Any = None
    limit: float = 0.0
    alpha: float = 1.0

    @classmethod
    def of(cls, args: Iterable[Any]) -> Self:
        """Name the arguments of an ``expert_linear`` or ``fused_expert_linear`` call, with
        defaults.
        """
        values = tuple(args)
        if len(values) == 5 and not isinstance(values[4], bool):  # the bias of ``expert_linear``
            return cls(*values[:4], bias=values[4])
        return cls(*values)

    def arguments(self) -> tuple[Any, ...]:
        """Return the positional arguments without trailing defaults, up to ``shared_gate``."""
        args: tuple[Any, ...] = tuple(self)
        return args if self.bias is not None or self.limit else args[:8]


def _expert_fake(given: FusedExpertArguments) -> Tensor:
    width = given.weight.shape[1] // 2 if given.swiglu else given.weight.shape[1]
    each = given.experts.shape if given.weights is None else given.experts.shape[:1]
    empty: Tensor = given.x.new_empty((*each, width))
    return empty


def _expert_cost(given: FusedExpertArguments) -> Cost:
    product = expert_linear.cost(*given[:4])
    read = product.elements_read
    for extra in (given.residual, given.shared, given.shared_gate, given.bias):
        read += extra.numel() if extra is not None else 0
    written = product.elements_written // 2 if given.swiglu else product.elements_written
    return Cost(product.flops, read, written)


@operator(
    fake=lambda *args, **kwargs: _expert_fake(FusedExpertArguments(*args, **kwargs)),
    cost=lambda *args: _expert_cost(FusedExpertArguments.of(args)),
)
def fused_expert_linear(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    weights: Tensor | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:
    """Apply ``expert_linear`` with the operations after it.

    With ``swiglu``, apply it to the two halves of each matmul: ``[T, K, O / 2]``. ``limit`` above 0
    selects ``clamped_swiglu``. With a weighted sum, add ``residual [T, O]`` and
    ``sigmoid_gate(shared [T, O], shared_gate [T, 1])`` if given.
    """
    y: Tensor = expert_linear.reference(x, weight, experts, weights, bias)
    if swiglu and limit:
        y = clamped_swiglu.reference(*y.chunk(2, dim=-1), limit, alpha)
    elif swiglu:
        y = swiglu_packed.reference(y)
    if shared is not None:
        y = y + sigmoid_gate.reference(shared, shared_gate)
    return y if residual is None else residual + y


class DeltaNormArguments(NamedTuple):
    """Named arguments for :data:`delta_rule_norm_step`: tensors or graph nodes.

    The arguments for ``gated_delta_rule_step`` precede the norm's arguments.
    """

    qkv: Any
    a: Any
    b: Any
    a_log: Any
    dt_bias: Any
    num_key_heads: int
    key_dim: int
    state: Any
    positions: Any
    cu_seqlens: Any
    slots: Any
    z: Any
    norm_weight: Any
    eps: float


@operator(
    fake=lambda *args: args[11].new_empty(args[11].shape),
    cost=lambda *args: gated_delta_rule_step.cost(*args[:11]),
    mutates=("state",),
)
def delta_rule_norm_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    state: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Apply ``gated_delta_rule_step``, then the head norm ``norm_weight [V]`` and the gate ``z [T,
    H V]``.

    Return ``silu(z) * rms_norm(o)``, shape ``[T, H V]``.
    """
    where = state, positions, cu_seqlens, slots
    o_THV = gated_delta_rule_step.reference(
        qkv, a, b, a_log, dt_bias, num_key_heads, key_dim, *where
    )
    normed = rms_norm.reference(o_THV, norm_weight, eps).flatten(-2)
    out: Tensor = swiglu.reference(z, normed)
    return out
