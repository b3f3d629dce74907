"""Cross-attention layers in Llama 3.2 Vision, and the text model with images.

Legend: T text tokens, V image rows in a request, H query heads, G key/value heads, D head size.
Image rows are the rows in used tiles, image after image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import MLP, Linear, RMSNorm
from tilewright.models.architectures.mllama import MllamaConfig, MllamaForCausalLM, MllamaModel
from tilewright.models.sources import Sources, TensorSource


class CrossAttention(nn.Module):
    """Attention from text tokens to image rows, with normalized heads and no rotation."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_width, kv_width = (
            count * config.head_dim for count in (config.num_heads, config.num_kv_heads)
        )
        self.q_proj = Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def keys_values(self, features_VC: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values for image rows, ``[V, G, D]``. A request computes them once."""
        k_VGD = self.k_proj(features_VC).unflatten(-1, (-1, self.head_dim))
        v_VGD = self.v_proj(features_VC).unflatten(-1, (-1, self.head_dim))
        return self.k_norm(k_VGD), v_VGD

    def forward(self, x: Tensor, k_VGD: Tensor, v_VGD: Tensor, visible: Tensor) -> Tensor:
        q_THD = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        o_THD = ops.cross_attention(q_THD, k_VGD, v_VGD, visible, self.head_dim**-0.5)
        return self.o_proj(o_THD.flatten(-2))


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

    def forward(self, x: Tensor, k_VGD: Tensor, v_VGD: Tensor, visible: Tensor) -> Tensor:
        sees_image = (visible[:, :1] < visible[:, 1:]).to(x.dtype)
        attended = self.cross_attn(self.input_layernorm(x), k_VGD, v_VGD, visible)
        x = ops.add_gated(x, attended, self.cross_attn_attn_gate)
        fed = self.mlp(self.post_attention_layernorm(x)) * sees_image
        found: Tensor = ops.add_gated(x, fed, self.cross_attn_mlp_gate)
        return found


class ImageTextModel(MllamaModel):
    """The text model with cross-attention layers between its layers."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__(config)
        self.cross_layers = nn.ModuleList(CrossLayer(config) for _ in config.cross_layers)
        self.order = [
            (layer in config.cross_layers, index) for layer, index in enumerate(_indices(config))
        ]

    def keys_values(self, features_VC: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return a request's image keys and values per cross-attention layer."""
        layers: list[Any] = list(self.cross_layers)
        return [layer.cross_attn.keys_values(features_VC) for layer in layers]

    def forward(  # type: ignore[override]
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        visible: Tensor,
    ) -> Tensor:
        x = self.embed_tokens(tokens_T)
        cos, sin = self.rotary(positions_T)
        for is_cross, index in self.order:
            if is_cross:
                x = self.cross_layers[index](x, *cache[index], visible)
            else:
                x = self.layers[index](x, cos, sin)
        return self.norm(x)


class ImageTextForCausalLM(MllamaForCausalLM):
    """Llama 3.2 Vision with its head, for requests with images."""

    model_class = ImageTextModel
    tensor_groups: Mapping[str, str] = {
        **MllamaForCausalLM.tensor_groups,
        "model.cross_layers.*.cross_attn.q_proj": "cross_wq",
        "model.cross_layers.*.cross_attn.[kv]_proj": "cross_wkv",
        "model.cross_layers.*.cross_attn.o_proj": "cross_wo",
        "model.cross_layers.*.cross_attn": "cross_kv_cache",
        "model.cross_layers.*.mlp.gate_proj": "ff1_3",
        "model.cross_layers.*.mlp.up_proj": "ff1_3",
        "model.cross_layers.*.mlp.down_proj": "ff2",
    }

    def forward(  # type: ignore[override]
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        visible: Tensor,
    ) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens_T, positions_T, cache, visible))
        return logits

    def sources(self) -> Sources:
        found = dict(super().sources())
        for name, _ in self.named_parameters():
            head, is_cross, rest = name.partition("cross_layers.")
            if is_cross:
                index, _, tail = rest.partition(".")
                stored = self.config.cross_layers[int(index)]
                found[name] = (TensorSource(f"{head}layers.{stored}.{tail}"),)
        return found


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
