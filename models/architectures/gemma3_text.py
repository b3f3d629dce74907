"""Gemma 3's text model (Gemma Team, 2025): windowed layers with a separate rotation, norms before
and after every block, norm weights stored minus 1, GeGLU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import (
    MLP,
    Attention,
    Embedding,
    RMSNorm,
    RotaryEmbedding,
    rotate_half_split,
)
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.rope import MAX_THETA, hf_rope
from tilewright.models.checkpoints.spelling.windows import (
    FULL,
    SLIDING,
    checked_types,
    windows_by_type,
)
from tilewright.models.config import MAX_POSITIONS, ModelConfig, RopeConfig
from tilewright.models.sources import Sources, TensorSource

_LAYERS_A_FULL_ONE = 6
"""Interval of layers without a window, in all models of the family. GGUF files do not contain
it.
"""

_ACTIVATION = "gelu_pytorch_tanh"

_LOCAL_ROPE = RopeConfig(theta=10000.0)

_LARGEST = 62
"""Number of layers in the 27B model. Only its scores are scaled by hidden size over heads."""


@dataclass(frozen=True, slots=True)
class Gemma3Config(ModelConfig):
    """Sizes and switches of a Gemma 3 text model.

    Attributes:
        local_rope: Rotation in windowed layers.
        query_scale: Inverse square of the score factor.
        attention_cap: Bound for scores. 0: none.
        logit_cap: Bound for logits. 0: none.
    """

    local_rope: RopeConfig = _LOCAL_ROPE
    query_scale: float = 256.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0


class Gemma3Attention(Attention):
    """Attention with a configured score scale and an optional score cap."""

    def __init__(self, config: Gemma3Config, window: int) -> None:
        super().__init__(config, window)
        self.scale, self.cap = config.query_scale**-0.5, config.attention_cap

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q_THD = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k_TGD = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q_THD = rotate_half_split(q_THD, cos, sin)
        k_TGD = rotate_half_split(k_TGD, cos, sin)
        o_THD = ops.attention(q_THD, k_TGD, v_TGD, self.scale, self.window, self.cap)
        return o_THD.flatten(-2)


class Gemma3MLP(MLP):
    """Gated feed-forward block with tanh-approximated GELU instead of SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Gemma3Layer(nn.Module):
    """Attention and feed-forward, with norms before and after, each added to the residual
    stream.
    """

    def __init__(self, config: Gemma3Config, window: int) -> None:
        super().__init__()
        sizes = config.hidden_size, config.norm_eps
        self.window = window
        self.input_layernorm = RMSNorm(*sizes)
        self.self_attn = Gemma3Attention(config, window)
        self.post_attention_layernorm = RMSNorm(*sizes)
        self.pre_feedforward_layernorm = RMSNorm(*sizes)
        self.mlp = Gemma3MLP(config)
        self.post_feedforward_layernorm = RMSNorm(*sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed)


class Gemma3Model(nn.Module):
    """Scaled embedding, decoder layers and final norm: tokens ``[T]`` to ``[T, hidden]``."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        self.scale = config.hidden_size**0.5
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim // 2)
        self.local_rotary = RotaryEmbedding(config.head_dim // 2)
        layers = (Gemma3Layer(config, config.window(i)) for i in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_T) * self.scale
        everywhere, local = self.rotary(positions_T), self.local_rotary(positions_T)
        for layer in self.layers:
            x = layer(x, *(local if layer.window else everywhere))
        return self.norm(x)


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3 with its language-model head. Logits may be capped."""

    config: Gemma3Config
    model_class = Gemma3Model

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        logits, cap = super().forward(tokens_T, positions_T), self.config.logit_cap
        return (logits / cap).tanh() * cap if cap else logits

    def sources(self) -> Sources:
        names = (name for name, _ in self.named_parameters() if name.endswith("norm.weight"))
        return {name: (TensorSource(name, offset=1.0),) for name in names}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        local = inverse_frequencies(self.config.local_rope, self.config.head_dim)
        own = {"model.local_rotary.inv_freq": torch.tensor(local, dtype=torch.float32)}
        return super().constants(max_context) | own


def read_hf(keys: Keys, config: Gemma3Config) -> Gemma3Config:
    """Add windows, local rotation, score scale and caps from config.json.

    Raises:
        CheckpointError: A key is missing or invalid, or the activation is unsupported.
    """
    for key in ("hidden_activation", "hidden_act"):
        keys.choice(key, (_ACTIVATION,), default=_ACTIVATION)
    pattern = keys.integer("sliding_window_pattern", 1, MAX_POSITIONS, default=_LAYERS_A_FULL_ONE)
    kinds = keys.get("layer_types") or _types(config.num_layers, pattern)
    kinds = checked_types(keys, kinds, config.num_layers)
    theta = keys.real("rope_local_base_freq", 1.0, MAX_THETA, default=10000.0)
    local = RopeConfig(theta=theta)
    nested = keys.get("rope_parameters")
    if isinstance(nested, dict) and SLIDING in nested:
        local = hf_rope(keys, config.head_dim, config.max_positions, layers=SLIDING)
    return dataclasses.replace(
        config,
        windows=windows_by_type(keys, kinds, config.max_positions),
        local_rope=local,
        query_scale=keys.real("query_pre_attn_scalar", 0.0, 1e9),
        attention_cap=keys.optional_real("attn_logit_softcapping", 0.0, 1e9) or 0.0,
        logit_cap=keys.optional_real("final_logit_softcapping", 0.0, 1e9) or 0.0,
    )


def read_gguf(keys: Keys, config: Gemma3Config) -> Gemma3Config:
    """Add windows from GGUF metadata. llama.cpp fixes the remaining values in its code.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    window = keys.integer("attention.sliding_window", 1, MAX_POSITIONS)
    kinds = _types(config.num_layers, _LAYERS_A_FULL_ONE)
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    theta = keys.real("rope.freq_base_swa", 1.0, MAX_THETA, default=10000.0)
    is_largest = config.num_layers == _LARGEST
    scale = config.hidden_size / config.num_heads if is_largest else config.head_dim
    changes: dict[str, Any] = {
        "windows": windows if window < config.max_positions else (),
        "local_rope": RopeConfig(theta=theta),
        "query_scale": float(scale),
        "logit_cap": keys.optional_real("final_logit_softcapping", 0.0, 1e9) or 0.0,
    }
    return dataclasses.replace(config, **changes)


def _types(num_layers: int, pattern: int) -> list[str]:
    """Return the layer types. Every ``pattern``-th layer has full attention."""
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def skips_tensor(config: Gemma3Config, name: str) -> bool:
    """Return whether a tensor belongs to the vision tower."""
    return name.startswith(("siglip.", "multi_modal_projector."))


ARCHITECTURE = Architecture(
    Gemma3ForCausalLM,
    config=Gemma3Config,
    fixed={"qk_norm": True},
    hf_defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    has_rope_by_layer=True,
    text_config=True,
    hf_prefixes={
        "vision_tower.vision_model.": "siglip.",
        "model.vision_tower.vision_model.": "siglip.",
        "model.vision_tower.": "siglip.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    skips_tensor=skips_tensor,
    gguf_names={
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    gguf_norm_offset=1.0,
)
