"""Layers of decoder models, in plain torch over flat tokens.

Legend: T tokens of one sequence, H query heads, G key/value heads, D head size, R = D / 2 pairs.
Passes add precision, parallelism, caches and batches to the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.config import ModelConfig


class Linear(nn.Linear):
    """A linear layer left uninitialised: weights come from a checkpoint, and torch's own
    initialisation imports more than a second's worth of modules on the meta device.
    """

    def reset_parameters(self) -> None:
        """Do nothing: values come from a checkpoint, and a random start would be lost time."""


class Embedding(nn.Embedding):
    """An embedding left uninitialised, for the reason that `Linear` is."""

    def reset_parameters(self) -> None:
        """Do nothing: values come from a checkpoint, and a random start would be lost time."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    """Angles of rotary position embedding (Su et al., 2021): cos and sin ``[T, 1, R]``, times
    ``factor``.
    """

    inv_freq: Tensor

    def __init__(self, num_pairs: int, factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(num_pairs), persistent=False)
        self.factor = factor

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_TR = positions_T.float().unsqueeze(-1) * self.inv_freq
        return self._scaled(angles_TR.cos()), self._scaled(angles_TR.sin())

    def _scaled(self, turn_TR: Tensor) -> Tensor:
        turn_TR = turn_TR if self.factor == 1.0 else turn_TR * self.factor
        return turn_TR.unsqueeze(1)


def rotate_half_split(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R) of every head, Hugging Face's order of q's and k's rows; channels
    from 2 R on stay as they are.
    """
    num_rotated, num_channels = 2 * cos.shape[-1], x_THD.shape[-1]
    if num_rotated == num_channels:
        first, second = x_THD.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned, rest = x_THD.split([num_rotated, num_channels - num_rotated], dim=-1)
    return torch.cat((rotate_half_split(turned, cos, sin), rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al., 2023).

    ``window``: positions that are seen, 0 for all.
    """

    def __init__(self, config: ModelConfig, window: int = 0) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        hidden, bias = config.hidden_size, config.attention_bias
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(hidden, q_width, bias=bias)
        self.k_proj = Linear(hidden, kv_width, bias=bias)
        self.v_proj = Linear(hidden, kv_width, bias=bias)
        self.o_proj = Linear(q_width, hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.o_proj(self.attend(x, cos, sin))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the concatenated outputs of all heads before the output matmul, ``[T, H D]``."""
        q_THD = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k_TGD = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD), self.k_norm(k_TGD)
        q_THD = rotate_half_split(q_THD, cos, sin)
        k_TGD = rotate_half_split(k_TGD, cos, sin)
        o_THD = ops.attention(q_THD, k_TGD, v_TGD, self.head_dim**-0.5, self.window)
        return o_THD.flatten(-2)


class MLP(nn.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward (``mlp``, else a dense one), each added to the residual
    stream.
    """

    def __init__(self, config: ModelConfig, window: int = 0, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config) if mlp is None else mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))
