"""Granite 3 and 4 dense (IBM, 2024): Llama with multipliers for embedding, residual, scores and
logits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from tilewright.compiler import ops
from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import Attention, DecoderLayer, rotate_half_split
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import ModelConfig

_MAX_MULTIPLIER = 1e6


@dataclass(frozen=True, slots=True)
class GraniteConfig(ModelConfig):
    """Sizes and multipliers of a Granite model.

    Attributes:
        embedding_factor: Factor for embeddings.
        residual_factor: Factor for the result of value block.
        score_factor: Factor for scores, instead of the head size's inverse root.
        logit_divisor: Logit divisor.
    """

    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    score_factor: float = 1.0
    logit_divisor: float = 1.0


class GraniteAttention(Attention):
    """Attention with a configured score factor."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.scale = config.score_factor

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_THD = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k_TGD = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TGD = rotate_half_split(q_THD, cos, sin), rotate_half_split(k_TGD, cos, sin)
        return ops.attention(q_THD, k_TGD, v_TGD, self.scale).flatten(-2)


class GraniteLayer(DecoderLayer):
    """A pre-norm layer with a factor for value block."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.self_attn = GraniteAttention(config)
        self.factor = config.residual_factor

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self._scaled(self.mlp(self.post_attention_layernorm(x)))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.factor == 1.0 else x * self.factor


class GraniteModel(LlamaModel):
    """Llama's embedding and norm with multipliers."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.factor = config.embedding_factor

    @staticmethod
    def make_layer(config: GraniteConfig, layer: int) -> GraniteLayer:
        return GraniteLayer(config)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_T)
        x = x if self.factor == 1.0 else x * self.factor
        cos, sin = self.rotary(positions_T)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite with its head."""

    config: GraniteConfig
    model_class = GraniteModel

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        logits, divisor = super().forward(tokens_T, positions_T), self.config.logit_divisor
        return logits if divisor == 1.0 else logits / divisor


def read_hf(keys: Keys, config: GraniteConfig) -> GraniteConfig:
    """Add the multipliers from config.json.

    Raises:
        CheckpointError: A multiplier is not a positive number.
    """
    return _with_factors(
        keys,
        config,
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        score=1.0,
    )


def read_gguf(keys: Keys, config: GraniteConfig) -> GraniteConfig:
    """Add the multipliers from GGUF metadata.

    Raises:
        CheckpointError: A multiplier is not a positive number.
    """
    names = "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    return _with_factors(keys, config, names, score=config.head_dim**-0.5)


def _with_factors(
    keys: Keys, config: GraniteConfig, names: tuple[str, ...], *, score: float
) -> GraniteConfig:
    defaults = 1.0, 1.0, score, 1.0
    embedding, residual, scores, logits = (
        keys.real(name, 0.0, _MAX_MULTIPLIER, default=default)
        for name, default in zip(names, defaults, strict=True)
    )
    return dataclasses.replace(
        config,
        embedding_factor=embedding,
        residual_factor=residual,
        score_factor=scores,
        logit_divisor=logits,
    )


ARCHITECTURE = Architecture(
    GraniteForCausalLM,
    config=GraniteConfig,
    read_hf=read_hf,
    read_gguf=read_gguf,
    gguf_pairs_adjacent=True,
)
