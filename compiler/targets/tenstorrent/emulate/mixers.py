"""Emulated routers, experts and Gated DeltaNet.

Products are exact. The convolution and the delta rule run in float32 between bfloat16 inputs and
outputs. Legend: T tokens, K experts per token, E experts, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.ops.delta_rule import (
    chunked_delta_rule,
    gates,
    recurrent_delta_rule,
    split_heads,
)
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import pack
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import MatmulSettings, matmul
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    CausalConv,
    ExpertMatmul,
    Route,
    TtDeltaRule,
)


def route(logits: Tensor, instruction: Route) -> tuple[Tensor, Tensor]:
    """Return weights bfloat16 and experts int64, both ``[T, K]``, for bfloat16 logits.

    Equal logits keep the order by index.
    """
    logits_fp32 = logits.float()
    order = torch.sort(logits_fp32, stable=True, dim=-1, descending=True)
    values, experts = order.values[:, : instruction.top_k], order.indices[:, : instruction.top_k]
    if instruction.renormalize:
        weights = values.softmax(-1)
    else:
        weights = logits_fp32.softmax(-1).gather(1, experts)
    return pack(weights, instruction.out.format), experts


def expert_products(
    x: Tensor,
    weight_ECN: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    item: ExpertMatmul,
    *,
    first: int,
    sign_error: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the products with a chip's experts, the first with index ``first``: ``[T, columns]``.

    ``bias [E, 1, N]`` is added to bfloat16 products. With weights, a product is rounded to
    bfloat16, weighted, rounded, and added in expert order.
    """
    num_rows, top_k = experts_TK.shape
    rows = x.view(num_rows, top_k, -1) if item.is_expanded else x.unsqueeze(1).expand(-1, top_k, -1)
    k_block = -(-rows.shape[-1] // TILE) * TILE
    settings = MatmulSettings.of(
        item.compute.name, k_block=k_block, out_format="bf16", sign_error=sign_error
    )
    columns = weight_ECN.shape[-1]
    result = x.new_zeros((num_rows, top_k, columns), dtype=torch.bfloat16)
    for expert in experts_TK.unique().tolist():
        if first <= expert < first + len(weight_ECN):
            chosen = experts_TK == expert
            product = matmul(rows[chosen].contiguous(), weight_ECN[expert - first], settings)
            if bias is not None:
                product = pack(product.float() + bias[expert - first].float(), "bf16")
            result[chosen] = product.bfloat16()
    if weights_TK is None:
        return pack(result.flatten(1), item.out.format)
    scaled = pack(result.float() * weights_TK.float().unsqueeze(-1), "bf16")
    order = experts_TK.argsort(dim=1).unsqueeze(-1).expand_as(scaled)
    scaled = scaled.gather(1, order)
    total = scaled[:, 0]
    for index in range(1, top_k):
        total = pack(total.float() + scaled[:, index].float(), "bf16")
    return pack(total, item.out.format)


def convolve(x: Tensor, weight_WC: Tensor, window: Tensor, item: CausalConv) -> Tensor:
    """Return SiLU after the convolution: rows ``[T, C]``, previous rows ``window [C, W - 1]``.

    ``window`` is updated in place.
    """
    padded = torch.cat((window, x.T.float()), dim=1)
    taps, length = len(weight_WC), len(x)
    total = x.new_zeros((x.shape[1], length), dtype=torch.float32)
    for tap in range(taps):
        total += padded[:, tap : tap + length] * weight_WC[tap].float().unsqueeze(1)
    window.copy_(padded[:, padded.shape[1] - window.shape[1] :])
    return pack(torch.nn.functional.silu(total.T), item.out.format)


def delta_rule(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    vectors: tuple[Tensor, Tensor],
    memory: Tensor,
    item: TtDeltaRule,
) -> Tensor:
    """Return the outputs ``[T, H * V]`` for a sequence. ``memory [H, K, V]`` is updated."""
    heads = split_heads(x, item.num_key_heads, item.key_dim, item.num_value_heads)
    rule = recurrent_delta_rule if len(x) == 1 else chunked_delta_rule
    out, after = rule(*heads, *gates(a, b, *vectors), memory)
    memory.copy_(after)
    return pack(out.flatten(1), item.out.format)
