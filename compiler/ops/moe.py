"""Sparse mixtures of experts: the choice of experts, and products with those that were chosen.

Legend: T tokens, C channels, E experts, K experts of a token, O outputs, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.dense import swiglu
from tilewright.compiler.ops.library import Cost, operator


def expected_experts(num_experts: int, num_tokens: int, top_k: int) -> float:
    """The number of different experts that so many tokens are expected to choose, were all equally
    likely.
    """
    missed: float = (1.0 - top_k / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def _router_cost(logits: Tensor, top_k: int, renormalise: bool) -> Cost:
    return Cost(5.0 * logits.numel(), logits.numel(), 2 * logits.shape[0] * top_k)


@operator(
    fake=lambda logits, top_k, renormalise: (
        logits.new_empty((logits.shape[0], top_k)),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int64),
    ),
    cost=_router_cost,
)
def router(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` likeliest experts of ``logits [T, E]``: weights and indices, both ``[T, K]``.

    Weights are probabilities over all experts (softmax in fp32), divided by their sum over those
    chosen where ``renormalise``; the likeliest come first, the lower index where two are equal.
    """
    probabilities = logits.float().softmax(-1)
    weights, experts = torch.sort(probabilities, stable=True, dim=-1, descending=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype).contiguous(), experts.contiguous()


@operator(
    fake=lambda experts, first, count: torch.empty_like(experts),
    cost=lambda experts, first, count: Cost(0.0, experts.numel(), experts.numel()),
)
def local_experts(experts: Tensor, first: int, count: int) -> Tensor:
    """The experts ``[T, K]`` as the rank that holds ``count`` of them from ``first`` on counts its
    own, from 0; -1 where an expert is another rank's, with which a product is zero.
    """
    is_own = (experts >= first) & (experts < first + count)
    return torch.where(is_own, experts - first, -1)


def _chosen(weight: Tensor, num_tokens: int, top_k: int) -> float:
    """Weights that are read: those of every expert that some token chose."""
    num_experts = weight.shape[0]
    return expected_experts(num_experts, num_tokens, top_k) * weight.numel() / num_experts


def _expert_linear_cost(
    x: Tensor, weight: Tensor, experts: Tensor, weights: Tensor | None = None
) -> Cost:
    num_tokens, top_k = experts.shape
    _, num_rows, num_columns = weight.shape
    written = num_tokens * num_rows * (top_k if weights is None else 1)
    flops = 2.0 * num_tokens * top_k * num_rows * num_columns
    return Cost(flops, x.numel() + _chosen(weight, num_tokens, top_k), written)


@operator(
    fake=lambda x, weight, experts, weights=None: x.new_empty(
        (*experts.shape, weight.shape[1]) if weights is None else (x.shape[0], weight.shape[1])
    ),
    cost=_expert_linear_cost,
)
def expert_linear(
    x: Tensor, weight: Tensor, experts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Products with the experts of each token: ``[T, K, O]``.

    ``x [T, C]``, one for all its experts, or ``[T, K, C]``; ``weight [E, O, C]``; ``experts
    [T, K]``, -1 where a product is zero. With ``weights [T, K]`` the products are multiplied by
    them and summed: ``[T, O]``.
    """
    num_tokens, top_k = experts.shape
    rows = x.unsqueeze(1).expand(-1, top_k, -1) if x.dim() == 2 else x
    out = x.new_zeros((num_tokens, top_k, weight.shape[1]))
    for expert in experts[experts >= 0].unique().tolist():
        chosen = experts == expert
        out[chosen] = torch.nn.functional.linear(rows[chosen], weight[expert])
    return out if weights is None else (out * weights.unsqueeze(-1)).sum(1)


def _experts_cost(
    x: Tensor, logits: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int, _: bool
) -> Cost:
    num_tokens, inner = x.shape[0], gate.shape[1]
    flops = 6.0 * num_tokens * top_k * inner * x.shape[-1]
    read = sum(_chosen(each, num_tokens, top_k) for each in (gate, up, down))
    return Cost(flops, x.numel() + logits.numel() + read, x.numel())


@operator(
    fake=lambda x, logits, gate, up, down, top_k, renormalise: torch.empty_like(x),
    cost=_experts_cost,
)
def experts(
    x: Tensor,
    logits: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    top_k: int,
    renormalise: bool,
) -> Tensor:
    """A whole block of gated experts, for targets that run it as one: ``[T, C]`` of ``x [T, C]``.

    :data:`router` of ``logits [T, E]``, then down(silu(gate(x)) * up(x)) of the chosen experts,
    weighted; ``gate`` and ``up [E, I, C]``, ``down [E, C, I]``.
    """
    weights, chosen = router.reference(logits, top_k, renormalise)
    gated = expert_linear.reference(x, gate, chosen)
    inner = swiglu.reference(gated, expert_linear.reference(x, up, chosen))
    out: Tensor = expert_linear.reference(inner, down, chosen, weights)
    return out
