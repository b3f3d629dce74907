"""Gated DeltaNet (Yang et al., 2024): attention whose past is one matrix a head, in plain torch.

Legend: T tokens, C channels, H value heads, G key heads, K size of a key, V size of a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import Linear, RMSNorm
from tilewright.models.config import DeltaShape

TENSOR_GROUPS: Mapping[str, str] = {
    "model.layers.*.linear_attn.in_proj_qkv": "delta_in",
    "model.layers.*.linear_attn.in_proj_z": "delta_in",
    "model.layers.*.linear_attn.in_proj_[ab]": "delta_gates",
    "model.layers.*.linear_attn.out_proj": "delta_out",
}


class DepthwiseConv(nn.Module):
    """The weights of a convolution along the sequence, each channel by itself: ``[C, 1, W]``."""

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return ops.causal_conv1d(x, self.weight)


class GatedDeltaNet(nn.Module):
    """Convolution, the gated delta rule, and a norm that a further product gates."""

    def __init__(self, hidden_size: int, shape: DeltaShape, norm_eps: float) -> None:
        super().__init__()
        self.shape = shape
        self.in_proj_qkv = Linear(hidden_size, shape.qkv_width, bias=False)
        self.in_proj_z = Linear(hidden_size, shape.value_width, bias=False)
        self.in_proj_b = Linear(hidden_size, shape.num_value_heads, bias=False)
        self.in_proj_a = Linear(hidden_size, shape.num_value_heads, bias=False)
        self.conv1d = DepthwiseConv(shape.qkv_width, shape.conv_width)
        self.A_log = nn.Parameter(torch.empty(shape.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.num_value_heads))
        self.norm = RMSNorm(shape.value_dim, norm_eps)
        self.out_proj = Linear(shape.value_width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.conv1d(self.in_proj_qkv(x))
        gates = self.in_proj_a(x), self.in_proj_b(x), self.A_log, self.dt_bias
        heads = self.shape.num_key_heads, self.shape.key_dim
        o_THV = self.norm(ops.gated_delta_rule(qkv, *gates, *heads))
        z_THV = self.in_proj_z(x).unflatten(-1, (-1, self.shape.value_dim))
        return self.out_proj((nn.functional.silu(z_THV) * o_THV).flatten(-2))
