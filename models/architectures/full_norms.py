"""Attention with one norm over all heads of q, and one over all heads of k."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.compiler import ops
from tilewright.models.architectures.layers import Attention, RMSNorm, rotate_half_split


class FullNormAttention(Attention):
    """Attention that normalizes q and k before the split into heads."""

    def __init__(self, config: Any, window: int = 0) -> None:
        super().__init__(config, window)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q_THD = self.q_norm(self.q_proj(x)).unflatten(-1, (-1, self.head_dim))
        k_TGD = self.k_norm(self.k_proj(x)).unflatten(-1, (-1, self.head_dim))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TGD = rotate_half_split(q_THD, cos, sin), rotate_half_split(k_TGD, cos, sin)
        o_THD = ops.attention(q_THD, k_TGD, v_TGD, self.head_dim**-0.5, self.window)
        return o_THD.flatten(-2)
