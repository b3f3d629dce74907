"""Llama (Touvron et al., 2023) and the models that share its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import (
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
)
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.config import ModelConfig
from tilewright.models.sources import Sources


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm: tokens ``[T]`` to hidden states ``[T, hidden]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        rope = config.rope
        self.rotary = RotaryEmbedding(rope.num_pairs(config.head_dim), rope.attention_factor)
        self.layers = nn.ModuleList(self.make_layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    @staticmethod
    def make_layer(config: Any, layer: int) -> nn.Module:
        """Return the decoder layer with index ``layer``."""
        return DecoderLayer(config, config.window(layer))

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_T)
        cos, sin = self.rotary(positions_T)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """A Llama with its language-model head: tokens, positions ``[T]`` to logits ``[T, vocab]``.

    ``model_class``: class of the model without the head.
    """

    model_class: ClassVar[type[Any]] = LlamaModel

    tensor_groups: Mapping[str, str] = {
        "model.embed_tokens": "embedding",
        "model.layers.*.self_attn.[qkv]_proj": "wqkv",
        "model.layers.*.self_attn.o_proj": "wo",
        "model.layers.*.self_attn": "kv_cache",
        "model.layers.*.mlp.gate_proj": "ff1_3",
        "model.layers.*.mlp.up_proj": "ff1_3",
        "model.layers.*.mlp.down_proj": "ff2",
        "lm_head": "lm_head",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens_T, positions_T))
        return logits

    def sources(self) -> Sources:
        """Return the sources of parameters without a checkpoint tensor of equal name."""
        return {}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        """Return buffers by name that are in no checkpoint, for contexts up to ``max_context``.

        None: the model's limit.
        """
        config = self.config
        longest = config.max_positions if max_context is None else max_context
        inv_freq = inverse_frequencies(config.rope, config.head_dim, longest)
        return {"model.rotary.inv_freq": torch.tensor(inv_freq, dtype=torch.float32)}


ARCHITECTURE = Architecture(LlamaForCausalLM, gguf_pairs_adjacent=True)
