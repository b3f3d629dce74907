"""What is left to the library: large products, attention of long prompts from their start, and
arithmetic between values that no kernel takes in.
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
    else:  # the CPU's products have no other type than their operands'
        torch.mm(x.float(), weight.float().T, out=out)


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``out += x weight^T`` with float32 sums, ``out`` float32."""
    if out.dtype == x.dtype:
        out.addmm_(x, weight.T)
    elif x.is_cuda:
        torch.addmm(out, x, weight.T, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(x.float(), weight.float().T)


def codes_product(x_codes: Tensor, codes: Tensor, one: Tensor) -> Tensor:
    """``x weight^T`` of e4m3 codes ``[M, K]`` and ``[N, K]``, float32; ``one``: 1 in float32 on the
    device, which the library reads there.

    Sums of 128 columns are the matrix unit's own, of some 14 bits; they go on in float32.
    """
    return torch._scaled_mm(x_codes, codes.T, scale_a=one, scale_b=one, out_dtype=torch.float32)


def scaled_product(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor]) -> Tensor:
    """Return :func:`codes_product` in bfloat16, with scales.

    Both operands are codes and scales (float32 ``[M, 1]`` and ``[N, 1]``, powers of two).
    cuBLAS has no float32 output with such scales.
    """
    (x_codes, x_scales), (codes, scales) = x, weight
    by_row = x_scales, scales.T
    return torch._scaled_mm(x_codes, codes.T, *by_row, out_dtype=torch.bfloat16)


def attend_from_start(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of ``q [T, H, D]`` to ``k``, ``v [T, G, D]``: ``[T, H D]``."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[0].transpose(0, 1).flatten(1)


def apply_function(function: str, out: Tensor, inputs: Sequence[Tensor | float | str]) -> None:
    """``out = function(*inputs)`` value by value, of tensors and numbers, in out's type.

    ``gelu`` takes a tensor and how it is approximated.
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
