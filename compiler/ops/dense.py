"""Operators without state: embedding, linear, norms, rotary embedding and SwiGLU.

Legend: T tokens, C channels, O outputs, V vocabulary, H heads, D head size, R rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, CostFunction, like, operator


def _elementwise(flops_per_element: float) -> CostFunction:
    def cost(x: Tensor, *_: object) -> Cost:
        count = x.numel()
        return Cost(flops_per_element * count, count, count)

    return cost


def _embedding_cost(tokens: Tensor, weight: Tensor) -> Cost:
    moved = tokens.numel() * weight.shape[-1]
    return Cost(0.0, moved, moved)


@operator(
    fake=lambda tokens, weight: weight.new_empty((*tokens.shape, weight.shape[-1])),
    cost=_embedding_cost,
)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return rows ``tokens [T]`` from ``weight [V, C]``: ``[T, C]``."""
    return weight[tokens.long()]


def _linear_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    products = rows * weight.shape[0] * weight.shape[1]
    return Cost(2.0 * products, x.numel() + weight.numel(), rows * weight.shape[0])


@operator(
    fake=lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
    cost=_linear_cost,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x [T, C]`` by transposed ``weight [O, C]`` and add ``bias [O]``. Return ``[T,
    O]``.
    """
    return torch.nn.functional.linear(x, weight, bias)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


@operator(fake=lambda x, weight, eps: like(x), cost=_elementwise(4.0))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to ``x [..., C]`` with ``weight [C]``, in fp32 (Zhang and Sennrich, 2019)."""
    return _rms_norm(x, weight, eps)


@operator(
    fake=lambda x, residual, weight, eps: (like(x), like(x)),
    cost=_elementwise(5.0),
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Fuse the residual add and the next norm: ``(rms_norm(x + residual), x + residual)``."""
    total = x + residual
    return _rms_norm(total, weight, eps), total


def rotate(
    x: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool, factor: float = 1.0
) -> Tensor:
    """Compute :data:`rope`, for fused operator references."""
    by_pair = positions.float() if positions.dim() == 2 else positions.float().unsqueeze(-1)
    angles = by_pair * inv_freq
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    width = 2 * inv_freq.shape[0]
    rotated, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned, rest), dim=-1)


@operator(
    fake=lambda x, positions, inv_freq, interleaved=False, factor=1.0: like(x),
    cost=_elementwise(3.0),
)
def rope(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    interleaved: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """Rotate the first 2 R channels of ``x [T, H, D]`` (Su et al., 2021).

    ``positions [T]`` are integers and ``inv_freq [R]`` is fp32. Pairs are (i, i + R), or neighbors
    if ``interleaved``. ``factor`` multiplies cosines and sines. ``positions [T, R]`` have a
    position for each pair.
    """
    return rotate(x, positions, inv_freq, interleaved, factor)


@operator(fake=lambda gate, up: like(gate), cost=_elementwise(5.0))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, both ``[T, C]`` (Shazeer, 2020)."""
    return torch.nn.functional.silu(gate) * up


@operator(fake=lambda gate, up, limit, alpha: like(gate), cost=_elementwise(8.0))
def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)``, both ``[T, C]``, in gpt-oss.

    ``gate`` does not exceed ``limit``, and ``up`` is within ``limit`` of 0.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@operator(fake=lambda x, gate: like(x), cost=_elementwise(4.0))
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)`` for ``x [T, C]`` and ``gate [T, C]`` or ``[T, 1]``."""
    return x * torch.sigmoid(gate)


@operator(fake=lambda x, approximate="none": like(x), cost=_elementwise(8.0))
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Apply GELU (Hendrycks and Gimpel, 2016). ``approximate`` is ``none`` or ``tanh``."""
    return torch.nn.functional.gelu(x, approximate=approximate)


@operator(
    fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    cost=_elementwise(2.5),
)
def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Apply :data:`swiglu` to the two halves of ``gate_up [T, 2 C]``, the result of a merged
    linear.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
