"""Qwen3.5's vision tower (Qwen Team, 2026): image patches to embeddings for the text model.

Legend: P patches in merge order, H heads, D channels per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import Linear
from tilewright.models.sources import Sources
from tilewright.models.vision_config import VisionConfig

_EPS = 1e-6
_THETA = 10000.0
_EXAMPLE_PATCHES = 12


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with weight and bias (Ba et al., 2016)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = ops.layer_norm(x, self.weight, self.bias, _EPS)
        return result


class PatchEmbed(nn.Module):
    """A linear layer on flat patches. The checkpoint has it as a convolution."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(config.patch_width, config.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        x: Tensor = self.proj(patches)
        return x


class PositionGrid(nn.Module):
    """A square position grid, resampled to an image's grid."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_positions, config.hidden_size))

    def forward(self, corners_P4: Tensor, weights_P4: Tensor) -> Tensor:
        result: Tensor = ops.interpolate_rows(self.weight, corners_P4, weights_P4)
        return result


class VisionAttention(nn.Module):
    """Attention between all patches in an image, with rotated rows and columns."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
        parts = self.qkv(x).split([x.shape[-1]] * 3, dim=-1)
        q_PHD, k_PHD, v_PHD = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)
        q_PHD = ops.rope(q_PHD, positions, inv_freq)
        k_PHD = ops.rope(k_PHD, positions, inv_freq)
        o_PHD = ops.full_attention(q_PHD, k_PHD, v_PHD, self.head_dim**-0.5)
        return self.proj(o_PHD.flatten(-2))


class VisionMLP(nn.Module):
    """Feed-forward block without a gate."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size)
        self.attn = VisionAttention(config)
        self.norm2 = LayerNorm(config.hidden_size)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), positions, inv_freq)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Projection from a block's patches to an embedding."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_merged = config.merge_size**2
        width = config.hidden_size * self.num_merged
        self.norm = LayerNorm(config.hidden_size)
        self.linear_fc1 = Linear(width, width)
        self.linear_fc2 = Linear(width, config.output_size)

    def forward(self, x: Tensor) -> Tensor:
        blocks = ops.merge_rows(self.norm(x), self.num_merged)
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(blocks)))


class VisionModules(nn.Module):
    """The modules in a tower, with names as in checkpoints."""

    inv_freq: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = PositionGrid(config)
        self.num_pairs = config.hidden_size // config.num_heads // 2
        self.register_buffer("inv_freq", torch.empty(self.num_pairs), persistent=False)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.merger = PatchMerger(config)

    def forward(
        self, patches: Tensor, corners: Tensor, weights: Tensor, positions: Tensor
    ) -> Tensor:
        x = self.patch_embed(patches) + self.pos_embed(corners, weights)
        for block in self.blocks:
            x = block(x, positions, self.inv_freq)
        result: Tensor = self.merger(x)
        return result


class VisionTower(nn.Module):
    """A tower: patches ``[P, width]``, corners and weights ``[P, 4]`` for the position grid, and
    positions ``[P, pairs]`` for the rotation, to embeddings ``[P / 4, hidden]``.
    """

    tensor_groups: Mapping[str, str] = {
        "visual.patch_embed.proj": "vision_patch",
        "visual.blocks.*.attn.qkv": "vision_wqkv",
        "visual.blocks.*.attn.proj": "vision_wo",
        "visual.blocks.*.mlp.linear_fc[12]": "vision_ff",
        "visual.merger.linear_fc[12]": "projector",
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionModules(config)

    def forward(
        self, patches: Tensor, corners: Tensor, weights: Tensor, positions: Tensor
    ) -> Tensor:
        result: Tensor = self.visual(patches, corners, weights, positions)
        return result

    def trace_inputs(self) -> tuple[dict[str, Tensor], tuple[dict[int, Any], ...]]:
        """Return example inputs by name, and their dynamic sizes."""
        width, count, pairs = self.config.patch_width, _EXAMPLE_PATCHES, self.visual.num_pairs
        inputs = {
            "patches": torch.empty(count, width, device="meta"),
            "corners": torch.empty(count, 4, dtype=torch.int64, device="meta"),
            "weights": torch.empty(count, 4, device="meta"),
            "positions": torch.empty(count, pairs, dtype=torch.int64, device="meta"),
        }
        length = torch.export.Dim("length", min=8, max=1 << 24)
        return inputs, ({0: length},) * len(inputs)

    def sources(self) -> Sources:
        """Return no sources: every parameter has a tensor."""
        return {}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        """Return rotation frequencies for rows, then the same frequencies for columns."""
        dim = self.visual.num_pairs
        powers = _THETA ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
        return {"visual.inv_freq": (1.0 / powers).repeat(2)}
