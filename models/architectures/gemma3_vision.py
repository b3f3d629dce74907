"""Gemma 3's vision tower (Gemma Team, 2025): SigLIP (Zhai et al., 2023), average pooling over
square blocks, and a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import Linear, RMSNorm
from tilewright.models.architectures.mllama_vision import LayerNorm
from tilewright.models.sources import Sources, TensorSource


@dataclass(frozen=True, slots=True)
class SquareTowerConfig:
    """Sizes for a tower with images of fixed size.

    Attributes:
        num_patches: Patches per image.
        tokens_per_side: Embeddings per side.
        output_size: Text model width.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    patch_size: int
    num_patches: int
    tokens_per_side: int
    norm_eps: float
    output_size: int


class SquareAttention(nn.Module):
    """Attention between all patches, without rotation."""

    def __init__(self, config: SquareTowerConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, config.hidden_size)
        self.v_proj = Linear(config.hidden_size, config.hidden_size)
        self.out_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        linears = self.q_proj, self.k_proj, self.v_proj
        q_PHD, k_PHD, v_PHD = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in linears)
        o_PHD = ops.full_attention(q_PHD, k_PHD, v_PHD, self.head_dim**-0.5)
        return self.out_proj(o_PHD.flatten(-2))


class SquareMLP(nn.Module):
    """Feed-forward block without a gate."""

    def __init__(self, config: SquareTowerConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x), approximate="tanh"))


class SquareBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: SquareTowerConfig) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SquareAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = SquareMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SquareModules(nn.Module):
    """The modules in a tower. Rules with ``layers`` select text layers only."""

    def __init__(self, config: SquareTowerConfig) -> None:
        super().__init__()
        width = 3 * config.patch_size**2
        self.patch_embedding = Linear(width, config.hidden_size)
        self.position_embedding = nn.Parameter(torch.empty(config.num_patches, config.hidden_size))
        self.blocks = nn.ModuleList(SquareBlock(config) for _ in range(config.num_layers))
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.soft_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = nn.Parameter(torch.empty(config.hidden_size, config.output_size))
        self.tokens_per_side = config.tokens_per_side
        self.factor = config.output_size**-0.5

    def forward(self, patches: Tensor) -> Tensor:
        x = ops.add_rows(self.patch_embedding(patches), self.position_embedding)
        for block in self.blocks:
            x = block(x)
        pooled = self.soft_norm(ops.pool_blocks(self.post_layernorm(x), self.tokens_per_side))
        result: Tensor = ops.project_rows(pooled, self.projection, self.factor)
        return result


class SquareTower(nn.Module):
    """A tower: patches ``[P, width]`` in scan order to embeddings ``[tokens, hidden]``.

    The text model multiplies all embeddings by a factor. The result is divided by this factor.
    """

    tensor_groups: Mapping[str, str] = {
        "siglip.patch_embedding": "vision_patch",
        "siglip.blocks.*.self_attn.[qkv]_proj": "vision_wqkv",
        "siglip.blocks.*.self_attn.out_proj": "vision_wo",
        "siglip.blocks.*.mlp.fc[12]": "vision_ff",
    }

    def __init__(self, config: SquareTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.siglip = SquareModules(config)

    def forward(self, patches: Tensor) -> Tensor:
        result: Tensor = self.siglip(patches)
        return result

    def trace_inputs(self) -> tuple[dict[str, Tensor], tuple[dict[int, Any], ...]]:
        """Return example inputs by name, and their dynamic sizes: none."""
        config = self.config
        shape = config.num_patches, 3 * config.patch_size**2
        return {"patches": torch.empty(shape, device="meta")}, ({},)

    def sources(self) -> Sources:
        """Return the names in checkpoints."""
        positions = "siglip.embeddings.position_embedding.weight"
        head = "multi_modal_projector.mm_"
        result = {
            "siglip.position_embedding": TensorSource(positions),
            "siglip.soft_norm.weight": TensorSource(f"{head}soft_emb_norm.weight", offset=1.0),
            "siglip.projection": TensorSource(f"{head}input_projection_weight"),
        }
        for name, _ in self.named_parameters():
            if name.startswith("siglip.patch_embedding."):
                result[name] = TensorSource(name.replace("siglip.", "siglip.embeddings."))
            if name.startswith("siglip.blocks."):
                result[name] = TensorSource(name.replace(".blocks.", ".encoder.layers."))
        return {name: (source,) for name, source in result.items()}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        """Return no constants."""
        return {}
