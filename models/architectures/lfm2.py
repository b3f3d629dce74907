"""LFM2 (Liquid AI, 2025): layers with short causal convolutions, or attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import MLP, Attention, Linear, RMSNorm
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import FULL
from tilewright.models.config import MAX_CONV_WIDTH, MAX_WIDTH, ModelConfig
from tilewright.models.sources import Sources, TensorSource

_CONV = "conv"
_MAX_FACTOR = 1e6
_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}
"""Module names in checkpoints, by module in a layer."""


@dataclass(frozen=True, slots=True)
class Lfm2Config(ModelConfig):
    """LFM2 sizes and switches.

    Attributes:
        conv_layers: Layer indices with a convolution instead of attention.
        conv_width: Tokens in a convolution, including the current token.
    """

    conv_layers: tuple[int, ...] = ()
    conv_width: int = 3


class PlainConv(nn.Module):
    """Causal convolution per channel, weights ``[C, 1, W]``, without an activation."""

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return ops.causal_conv1d(x, self.weight, False)


class ShortConv(nn.Module):
    """A convolution with a gate before and a gate after it."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.b_proj = Linear(hidden, hidden, bias=False)
        self.c_proj = Linear(hidden, hidden, bias=False)
        self.x_proj = Linear(hidden, hidden, bias=False)
        self.conv = PlainConv(hidden, config.conv_width)
        self.out_proj = Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, x = self.b_proj(x), self.c_proj(x), self.x_proj(x)
        return self.out_proj(c * self.conv(b * x))


class Lfm2Layer(nn.Module):
    """A pre-norm convolution or attention, and feed-forward, added to the residual stream."""

    def __init__(self, config: Lfm2Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.is_conv = layer in config.conv_layers
        if self.is_conv:
            self.conv = ShortConv(config)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.conv(normed) if self.is_conv else self.self_attn(normed, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))


class Lfm2Model(LlamaModel):
    """Llama's embedding and norm with LFM2's layers."""

    @staticmethod
    def make_layer(config: Lfm2Config, layer: int) -> Lfm2Layer:
        return Lfm2Layer(config, layer)


class Lfm2ForCausalLM(LlamaForCausalLM):
    """LFM2 with its head."""

    config: Lfm2Config
    model_class = Lfm2Model
    tensor_groups: Mapping[str, str] = {
        **LlamaForCausalLM.tensor_groups,
        "model.layers.*.conv.[bcx]_proj": "wqkv",
        "model.layers.*.conv.out_proj": "wo",
    }

    def sources(self) -> Sources:
        hidden = self.config.hidden_size
        sources = {"model.norm.weight": (TensorSource("model.embedding_norm.weight"),)}
        for name, _ in self.named_parameters():
            prefix, layer, module = _parts_of(name)
            if module in _NAMES:
                sources[name] = (TensorSource(f"{prefix}{layer}.{_NAMES[module]}.weight"),)
            elif module.startswith("conv.") and module[5:] in ("b_proj", "c_proj", "x_proj"):
                first = "bcx".index(module[5]) * hidden
                tensor = f"{prefix}{layer}.conv.in_proj.weight"
                sources[name] = (TensorSource(tensor, (first, first + hidden)),)
        return sources


def _parts_of(name: str) -> tuple[str, str, str]:
    """Return prefix, layer and module for a parameter name."""
    prefix = "model.layers."
    layer, _, module = name.removeprefix(prefix).partition(".")
    return prefix, layer, module.removesuffix(".weight")


def read_hf(keys: Keys, config: Lfm2Config) -> Lfm2Config:
    """Add layer types, the convolution and the inner size from config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    if keys.boolean("conv_bias", default=False):
        raise keys.error("conv_bias", True, "allowed: false")
    tied = keys.boolean("tie_word_embeddings", default=True)
    return dataclasses.replace(
        config,
        conv_layers=_conv_layers(keys, config.num_layers),
        conv_width=keys.integer("conv_L_cache", 2, MAX_CONV_WIDTH, default=3),
        intermediate_size=_inner_size(keys, config.intermediate_size),
        norm_eps=keys.real("norm_eps", 0.0, 1.0, default=1e-5),
        tie_embeddings=keys.boolean("tie_embedding", default=tied),
    )


def _conv_layers(keys: Keys, count: int) -> tuple[int, ...]:
    """Return the layers without attention. Older files have a list of layers with attention."""
    layer_types: Any = keys.get("layer_types")
    if layer_types is None:
        full: Any = keys.get("full_attn_idxs")
        full = list(range(count)) if full is None else full
        if not isinstance(full, list) or any(
            type(i) is not int or i not in range(count) for i in full
        ):
            tail = f"allowed: a list of layers from 0 to {count - 1}"
            raise keys.error("full_attn_idxs", full, tail)
        layer_types = [FULL if layer in full else _CONV for layer in range(count)]
    tail = f"allowed: {count} of {FULL}, {_CONV}"
    if not isinstance(layer_types, list) or len(layer_types) != count:
        raise keys.error("layer_types", layer_types, tail)
    for layer_type in layer_types:
        if layer_type not in (FULL, _CONV):
            raise keys.error("layer_types", layer_type, tail)
    return tuple(layer for layer in range(count) if layer_types[layer] == _CONV)


def _inner_size(keys: Keys, size: int) -> int:
    """Return the feed-forward inner size. Published files reduce it."""
    size = keys.integer("block_ff_dim", 1, MAX_WIDTH, default=size)
    factor = keys.real("block_ffn_dim_multiplier", 0.0, _MAX_FACTOR, default=1.0)
    multiple = keys.integer("block_multiple_of", 1, MAX_WIDTH, default=256)
    if not keys.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(factor * int(2 * size / 3))
    return -(-size // multiple) * multiple


ARCHITECTURE = Architecture(
    Lfm2ForCausalLM,
    config=Lfm2Config,
    fixed={"qk_norm": True, "attention_bias": False, "output_bias": False, "mlp_bias": False},
    hf_defaults={
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    read_hf=read_hf,
)
