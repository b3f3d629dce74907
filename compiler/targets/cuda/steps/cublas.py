"""Library operations: large matmuls, prefill attention from the first position, and value-by-value
arithmetic without a fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def store_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``out = x weight^T`` with float32 sums, in out's type."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.T, out=out)
    elif x.is_cuda:
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
    else:  # CPU matmuls return the operand type only
        torch.mm(x.float(), weight.float().T, out=out)


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``out += x weight^T`` with float32 sums, ``out`` float32."""
    if out.dtype == x.dtype:
        out.addmm_(x, weight.T)
    elif x.is_cuda:
        torch.addmm(out, x, weight.T, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(x.float(), weight.float().T)


def codes_product(
    x_codes: Tensor, codes: Tensor, one: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply e4m3 codes ``[M, K]`` and ``[N, K]`` into ``dtype``. ``one`` is 1 on the device.

    The matrix unit sums 128 columns with about 14 bits. float32 adds these sums. Callers apply the
    scales, because torch's kernels with a scale for each token are slower.
    """
    return torch._scaled_mm(x_codes, codes.T, scale_a=one, scale_b=one, out_dtype=dtype)


def attend_from_start(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention ``[T, H D]`` for ``q [T, H, D]`` and ``k``, ``v [T, G, D]``."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[0].transpose(0, 1).flatten(1)


def apply_function(function: str, out: Tensor, inputs: Sequence[Tensor | float | str]) -> None:
    """Compute ``out = function(*inputs)`` value by value for tensors and numbers, in out's type.

    ``gelu`` takes a tensor and the approximation.
    """
    if function == "gelu":
        x, approximate = inputs
        assert isinstance(x, Tensor)
        out.copy_(F.gelu(x.float(), approximate=str(approximate)))
        return
    functions: dict[str, Any] = {
        "add": torch.add,
        "mul": torch.mul,
        "div": torch.div,
        "tanh": torch.tanh,
    }
    functions[function](*inputs, out=out)
