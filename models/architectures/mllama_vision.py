"""Vision tower in Llama 3.2 Vision: image tiles to features for cross-attention.

All tiles are encoded together, unused tiles included. Used tiles see the rows in unused tiles, and
the tower cannot skip them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import Linear
from tilewright.models.sources import Sources, TensorSource

_ROW_MULTIPLE = 8
"""Multiple for the padded row count."""

_OUTER_EPS = 1e-5
"""Epsilon for the norms before and after the layers."""


@dataclass(frozen=True, slots=True)
class TileTowerConfig:
    """Sizes for a vision tower.

    Attributes:
        num_layers: Layers before the global layers.
        kept_layers: Layers whose inputs are features, ascending.
        num_patches: Patches per tile, without the class row.
        output_size: Text model width.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    num_global_layers: int
    kept_layers: tuple[int, ...]
    patch_size: int
    num_patches: int
    norm_eps: float
    output_size: int
    max_tiles: int = 4
    num_aspects: int = 8

    @property
    def num_rows(self) -> int:
        """Return the row count per tile, with the class row."""
        return self.num_patches + 1

    @property
    def num_padded_rows(self) -> int:
        """Return the row count per tile in the layers."""
        return -(-self.num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE

    @property
    def feature_size(self) -> int:
        """Return the feature width before the projection."""
        return self.hidden_size * (1 + len(self.kept_layers))


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with weight and bias (Ba et al., 2016)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = ops.layer_norm(x, self.weight, self.bias, self.eps)
        return result


class Table(nn.Module):
    """Values by aspect ratio."""

    def __init__(self, num_aspects: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_aspects + 1, width))


class TileEmbedding(nn.Module):
    """A gated vector per tile, selected by the aspect ratio."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(1))
        self.embedding = Table(config.num_aspects, config.max_tiles * config.hidden_size)

    def forward(self, x_NPC: Tensor, aspect: Tensor) -> Tensor:
        result: Tensor = ops.add_tile_rows(x_NPC, self.embedding.weight, aspect, self.gate)
        return result


class PositionEmbedding(nn.Module):
    """Gated sum with a vector per row, and a vector per row and tile."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        rows, width = config.num_rows, config.hidden_size
        self.gate = nn.Parameter(torch.empty(1))
        self.embedding = nn.Parameter(torch.empty(rows, width))
        self.tile_embedding = Table(config.num_aspects, config.max_tiles * rows * width)

    def forward(self, x_NPC: Tensor, aspect: Tensor) -> Tensor:
        x = ops.add_position_rows(x_NPC, self.embedding, self.gate)
        result: Tensor = ops.add_tile_rows(x, self.tile_embedding.weight, aspect, self.gate)
        return result


class TileAttention(nn.Module):
    """Attention between all rows in all tiles, without rotation."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = hidden // config.num_heads
        self.q_proj = Linear(hidden, hidden, bias=False)
        self.k_proj = Linear(hidden, hidden, bias=False)
        self.v_proj = Linear(hidden, hidden, bias=False)
        self.o_proj = Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q_PHD = self.q_proj(x).unflatten(-1, heads)
        k_PHD = self.k_proj(x).unflatten(-1, heads)
        v_PHD = self.v_proj(x).unflatten(-1, heads)
        o_PHD = ops.tile_attention(q_PHD, k_PHD, v_PHD, is_padding, self.head_dim**-0.5)
        return self.o_proj(o_PHD.flatten(-2))


class TowerMLP(nn.Module):
    """Feed-forward block without a gate."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class TowerLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.self_attn = TileAttention(config)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = TowerMLP(config)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), is_padding)
        return x + self.mlp(self.post_attention_layernorm(x))


class GlobalLayer(TowerLayer):
    """A layer with gated branches."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__(config)
        self.gate_attn = nn.Parameter(torch.empty(1))
        self.gate_ffn = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), is_padding)
        x = ops.add_gated(x, attended, self.gate_attn)
        fed = self.mlp(self.post_attention_layernorm(x))
        result: Tensor = ops.add_gated(x, fed, self.gate_ffn)
        return result


class Blocks(nn.Module):
    """A list with layers. Its name is not ``layers``, which selects text layers in rules."""

    def __init__(self, layers: list[TowerLayer]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)


class TileTowerModel(nn.Module):
    """Patches to features before the projection."""

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        self.config = config
        hidden, patch_width = config.hidden_size, 3 * config.patch_size**2
        self.patch_embedding = Linear(patch_width, hidden, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(hidden))
        self.gated_positional_embedding = PositionEmbedding(config)
        self.pre_tile_positional_embedding = TileEmbedding(config)
        self.post_tile_positional_embedding = TileEmbedding(config)
        self.layernorm_pre = LayerNorm(hidden, _OUTER_EPS)
        self.layernorm_post = LayerNorm(hidden, _OUTER_EPS)
        self.transformer = Blocks([TowerLayer(config) for _ in range(config.num_layers)])
        layers: list[TowerLayer] = [GlobalLayer(config) for _ in range(config.num_global_layers)]
        self.global_transformer = Blocks(layers)

    def forward(self, patches: Tensor, aspect: Tensor, is_padding: Tensor) -> Tensor:
        config = self.config
        rows, padded = config.num_rows, config.num_padded_rows
        x = self.pre_tile_positional_embedding(self.patch_embedding(patches), aspect)
        x = ops.prepend_row(x, self.class_embedding)
        x = self.layernorm_pre(self.gated_positional_embedding(x, aspect))
        x = ops.pad_rows(x, padded)
        kept = []
        for index, layer in enumerate(self.transformer.blocks):
            if index in config.kept_layers:  # inputs, as in training
                kept.append(x)
            x = layer(x, is_padding)
        x = self.layernorm_post(x).unflatten(0, (config.max_tiles, padded))
        x = self.post_tile_positional_embedding(x, aspect).flatten(0, 1)
        for layer in self.global_transformer.blocks:
            x = layer(x, is_padding)
        result: Tensor = ops.tile_features(x, kept, config.max_tiles, rows)
        return result


class TileTower(nn.Module):
    """A tower with its projection.

    ``patches [tiles, patches, 3 x side x side]`` (channel, row, column), ``aspect [1]`` and
    ``is_padding [tiles x padded rows]`` give features ``[tiles x rows, text width]``.
    """

    tensor_groups: Mapping[str, str] = {
        "vision_model.patch_embedding": "vision_patch",
        "vision_model.*transformer.blocks.*.self_attn.[qkv]_proj": "vision_wqkv",
        "vision_model.*transformer.blocks.*.self_attn.o_proj": "vision_wo",
        "vision_model.*transformer.blocks.*.mlp.fc[12]": "vision_ff",
        "multi_modal_projector": "projector",
    }

    def __init__(self, config: TileTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = TileTowerModel(config)
        self.multi_modal_projector = Linear(config.feature_size, config.output_size)

    def forward(self, patches: Tensor, aspect: Tensor, is_padding: Tensor) -> Tensor:
        return self.multi_modal_projector(self.vision_model(patches, aspect, is_padding))

    def trace_inputs(self) -> tuple[dict[str, Tensor], tuple[dict[int, object], ...]]:
        """Return example inputs by name, and their dynamic sizes: none."""
        config = self.config
        width, rows = 3 * config.patch_size**2, config.max_tiles * config.num_padded_rows
        inputs = {
            "patches": torch.empty(config.max_tiles, config.num_patches, width, device="meta"),
            "aspect": torch.empty(1, dtype=torch.int64, device="meta"),
            "is_padding": torch.empty(rows, dtype=torch.bool, device="meta"),
        }
        return inputs, ({}, {}, {})

    def sources(self) -> Sources:
        """Return the layer names in checkpoints."""
        names = (name for name, _ in self.named_parameters() if ".blocks." in name)
        return {name: (TensorSource(name.replace(".blocks.", ".layers.")),) for name in names}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        """Return no constants."""
        return {}
