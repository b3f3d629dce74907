"""Sparse mixtures of experts: expert selection, and matmuls with the selected experts.

Legend: T tokens, C channels, E experts, K experts per token, O outputs, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.dense import swiglu
from tilewright.compiler.ops.library import Cost, like, operator


def expected_experts(num_experts: int, num_tokens: int, top_k: int) -> float:
    """Return the expected distinct expert count for ``num_tokens`` tokens with uniform
    selection.
    """
    missed: float = (1.0 - top_k / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def _router_cost(logits: Tensor, top_k: int, *_: object) -> Cost:
    return Cost(5.0 * logits.numel(), logits.numel(), 2 * logits.shape[0] * top_k)


@operator(
    fake=lambda logits, top_k, renormalise, bias=None, scale=1.0: (
        logits.new_empty((logits.shape[0], top_k)),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int64),
    ),
    cost=_router_cost,
)
def router(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Select the ``top_k`` best experts from ``logits [T, E]``.

    Return weights and indices, both ``[T, K]``, in descending order. The lower index wins a tie.
    Weights are softmax probabilities over all experts, in fp32. ``renormalise`` divides them by
    their sum over the selected experts.

    With ``bias [E]``, weights are the logits' sigmoids, times ``scale``. The bias is added for
    the selection and its order only.
    """
    if bias is None:
        likely = ranked = logits.float().softmax(-1)
    else:
        likely = logits.float().sigmoid()
        ranked = likely + bias.float()
    experts = torch.sort(ranked, stable=True, dim=-1, descending=True)[1][:, :top_k]
    weights = likely.gather(-1, experts)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(logits.dtype).contiguous(), experts.contiguous()


@operator(
    fake=lambda experts, first, count: like(experts),
    cost=lambda experts, first, count: Cost(0.0, experts.numel(), experts.numel()),
)
def local_experts(experts: Tensor, first: int, count: int) -> Tensor:
    """Map global expert indices ``[T, K]`` to this rank's indices.

    The rank has ``count`` experts starting at ``first``. Experts on other ranks become -1, and
    their matmul result is zero.
    """
    is_own = (experts >= first) & (experts < first + count)
    return torch.where(is_own, experts - first, -1)


def _chosen(weight: Tensor, num_tokens: int, top_k: int) -> float:
    """Return the number of weight elements read: all elements of each selected expert."""
    num_experts = weight.shape[0]
    return expected_experts(num_experts, num_tokens, top_k) * weight.numel() / num_experts


def _expert_linear_cost(
    x: Tensor, weight: Tensor, experts: Tensor, weights: Tensor | None = None, *more: object
) -> Cost:
    num_tokens, top_k = experts.shape
    _, num_rows, num_columns = weight.shape
    written = num_tokens * num_rows * (top_k if weights is None else 1)
    flops = 2.0 * num_tokens * top_k * num_rows * num_columns
    return Cost(flops, x.numel() + _chosen(weight, num_tokens, top_k), written)


@operator(
    fake=lambda x, weight, experts, weights=None, bias=None: x.new_empty(
        (*experts.shape, weight.shape[1]) if weights is None else (x.shape[0], weight.shape[1])
    ),
    cost=_expert_linear_cost,
)
def expert_linear(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply each token with its experts' weights. Return ``[T, K, O]``.

    Args:
        x: ``[T, C]``, common to all experts of a token, or ``[T, K, C]``.
        weight: ``[E, O, C]``.
        experts: ``[T, K]``. -1 gives zeros.
        weights: ``[T, K]``. If given, return the weighted sum ``[T, O]``.
        bias: ``[E, O, 1]``, added before the weighted sum.
    """
    num_tokens, top_k = experts.shape
    rows = x.unsqueeze(1).expand(-1, top_k, -1) if x.dim() == 2 else x
    out = x.new_zeros((num_tokens, top_k, weight.shape[1]))
    for expert in experts[experts >= 0].unique().tolist():
        chosen = experts == expert
        own = None if bias is None else bias[expert].flatten()
        out[chosen] = torch.nn.functional.linear(rows[chosen], weight[expert], own)
    return out if weights is None else (out * weights.unsqueeze(-1)).sum(1)


def _experts_cost(
    x: Tensor, logits: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int, _: bool
) -> Cost:
    num_tokens, inner = x.shape[0], gate.shape[1]
    flops = 6.0 * num_tokens * top_k * inner * x.shape[-1]
    read = sum(_chosen(each, num_tokens, top_k) for each in (gate, up, down))
    return Cost(flops, x.numel() + logits.numel() + read, x.numel())


@operator(
    fake=lambda x, logits, gate, up, down, top_k, renormalise: like(x),
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
    """Compute a whole block of gated experts, for targets with a single kernel for it.

    Apply :data:`router` to ``logits [T, E]``, then down(silu(gate(x)) * up(x)) for the selected
    experts with their weights. ``x`` and the result are ``[T, C]``, ``gate`` and ``up`` are ``[E,
    I, C]``, ``down`` is ``[E, C, I]``.
    """
    weights, chosen = router.reference(logits, top_k, renormalise)
    gated = expert_linear.reference(x, gate, chosen)
    inner = swiglu.reference(gated, expert_linear.reference(x, up, chosen))
    out: Tensor = expert_linear.reference(inner, down, chosen, weights)
    return out
