"""Cross-attention layers in Llama 3.2 Vision, and the text model with images.

Legend: T text tokens, V image rows in a request, H query heads, G key/value heads, D head size.
Image rows are the rows in used tiles, image after image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import MLP, Linear, RMSNorm
from tilewright.models.architectures.mllama import MllamaConfig, MllamaForCausalLM, MllamaModel
from tilewright.models.architectures.mllama_vision import TileTower, TileTowerConfig
from tilewright.models.sources import Sources, TensorSource


class CrossAttention(nn.Module):
    """Attention from text tokens to image rows, with normalized heads and no rotation."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__()
        self.scale, self.eps = config.head_dim**-0.5, config.norm_eps
        self.num_kv_heads = config.num_kv_heads
        q_width = config.num_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_width, bias=False)
        self.o_proj = Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cache: Tensor, visible: Tensor, layer: int) -> Tensor:
        norm = self.q_norm.weight, self.eps
        attended = ops.cross_attention(
            self.q_proj(x), cache, visible, *norm, self.num_kv_heads, layer, self.scale
        )
        return self.o_proj(attended)


class CrossKeysValues(nn.Module):
    """Keys and values for a cross-attention layer. An image computes them once."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.k_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, features_VC: Tensor) -> tuple[Tensor, Tensor]:
        k_VGD = self.k_norm(self.k_proj(features_VC).unflatten(-1, (-1, self.head_dim)))
        return k_VGD.flatten(-2), self.v_proj(features_VC)


class ImageEncoderModel(TileTower):
    """The vision tower, and the cross-attention keys and values for its features.

    The result ``[tiles x rows, cache width]`` has keys, then values, layer after layer.
    """

    tensor_groups: Mapping[str, str] = {
        **TileTower.tensor_groups,
        "cross_layers.*.[kv]_proj": "cross_wkv",
    }

    def __init__(self, tower: TileTowerConfig, text: MllamaConfig) -> None:
        super().__init__(tower)
        self.stored_layers = text.cross_layers
        self.cross_layers = nn.ModuleList(CrossKeysValues(text) for _ in text.cross_layers)

    def forward(self, patches: Tensor, aspect: Tensor, is_padding: Tensor) -> Tensor:
        features = super().forward(patches, aspect, is_padding)
        pieces = [columns for layer in self.cross_layers for columns in layer(features)]
        result: Tensor = ops.join_columns(pieces)
        return result

    def sources(self) -> Sources:
        return {**super().sources(), **_cross_sources(self, self.stored_layers, ".cross_attn")}


class CrossLayer(nn.Module):
    """Gated cross-attention and feed-forward. A token without visible rows passes unchanged."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.cross_attn = CrossAttention(config)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, cache: Tensor, visible: Tensor, layer: int) -> Tensor:
        attended = self.cross_attn(self.input_layernorm(x), cache, visible, layer)
        x = ops.add_gated(x, attended, self.cross_attn_attn_gate)
        fed = ops.mask_text_rows(self.mlp(self.post_attention_layernorm(x)), visible)
        result: Tensor = ops.add_gated(x, fed, self.cross_attn_mlp_gate)
        return result


class ImageTextModel(MllamaModel):
    """The text model with cross-attention layers between its layers."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__(config)
        self.cross_layers = nn.ModuleList(CrossLayer(config) for _ in config.cross_layers)
        self.order = [
            (layer in config.cross_layers, index) for layer, index in enumerate(_indices(config))
        ]

    def forward(  # type: ignore[override]
        self, tokens_T: Tensor, positions_T: Tensor, cross_cache: Tensor, visible: Tensor
    ) -> Tensor:
        x = self.embed_tokens(tokens_T)
        cos, sin = self.rotary(positions_T)
        for is_cross, index in self.order:
            if is_cross:
                x = self.cross_layers[index](x, cross_cache, visible, index)
            else:
                x = self.layers[index](x, cos, sin)
        return self.norm(x)


class ImageTextForCausalLM(MllamaForCausalLM):
    """Llama 3.2 Vision with its head, for requests with images."""

    model_class = ImageTextModel
    tensor_groups: Mapping[str, str] = {
        **MllamaForCausalLM.tensor_groups,
        "model.cross_layers.*.cross_attn.q_proj": "cross_wq",
        "model.cross_layers.*.cross_attn.o_proj": "cross_wo",
        "model.cross_layers.*.cross_attn": "cross_kv_cache",
        "model.cross_layers.*.mlp.gate_proj": "ff1_3",
        "model.cross_layers.*.mlp.up_proj": "ff1_3",
        "model.cross_layers.*.mlp.down_proj": "ff2",
    }

    def forward(  # type: ignore[override]
        self, tokens_T: Tensor, positions_T: Tensor, cross_cache: Tensor, visible: Tensor
    ) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens_T, positions_T, cross_cache, visible))
        return logits

    def trace_inputs(self) -> tuple[dict[str, Tensor], tuple[dict[int, object], ...]]:
        """Return example inputs by name, and their dynamic sizes."""
        width = self.config.num_kv_heads * self.config.head_dim * 2 * len(self.config.cross_layers)
        tokens, positions = torch.empty((2, 7), dtype=torch.int64, device="meta").clone()
        inputs = {
            "tokens": tokens,
            "positions": positions,
            "cross_cache": torch.empty(5, width, device="meta"),
            "visible": torch.empty(7, 2, dtype=torch.int64, device="meta"),
        }
        length = torch.export.Dim("length", min=2, max=1 << 24)
        rows = torch.export.Dim("rows", min=2, max=1 << 24)
        return inputs, ({0: length}, {0: length}, {0: rows}, {0: length})

    def sources(self) -> Sources:
        return {
            **super().sources(),
            **_cross_sources(self.model, self.config.cross_layers, "", "model."),
        }


def _cross_sources(
    module: nn.Module, stored_layers: Sequence[int], columns: str, prefix: str = ""
) -> Sources:
    """Return the checkpoint's names for parameters in ``cross_layers``."""
    result = {}
    for name, _ in module.named_parameters():
        if name.startswith("cross_layers."):
            _, index, tail = name.split(".", 2)
            stored = f"model.layers.{stored_layers[int(index)]}{columns}.{tail}"
            result[prefix + name] = (TensorSource(stored),)
    return result


def _indices(config: MllamaConfig) -> list[int]:
    """Return the index for every stored layer among layers with its type."""
    total = config.num_layers + len(config.cross_layers)
    counts = {True: 0, False: 0}
    indices = []
    for layer in range(total):
        is_cross = layer in config.cross_layers
        indices.append(counts[is_cross])
        counts[is_cross] += 1
    return indices
