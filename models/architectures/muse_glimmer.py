"""Muse-Glimmer's text model (Meta, 2026): windowed layers with a rotation, full attention without,
gated attention, and norms without weights for embeddings, q and k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import (
    MLP,
    Attention,
    Embedding,
    Linear,
    RMSNorm,
    rotate_half_split,
)
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.architectures.two_ropes import TwoRopesForCausalLM, TwoRopesModel
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import (
    FULL,
    SLIDING,
    checked_types,
    windows_by_type,
)
from tilewright.models.config import TwoRopesConfig
from tilewright.models.sources import Sources, TensorSource

_INTERVAL = 4
"""Interval between layers with full attention, up to the last layer."""
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class MuseGlimmerConfig(TwoRopesConfig):
    """Muse-Glimmer sizes and switches.

    Attributes:
        post_norm_eps: Epsilon in norms after blocks.
        query_factor: Query factor, in addition to the head size's inverse root.
        logit_factor: Logit factor before the cap.
        logit_cap: Bound for logits.
    """

    post_norm_eps: float = 1e-8
    query_factor: float = 3.87
    logit_factor: float = 1.0
    logit_cap: float = 20.0


class UnitNorm(RMSNorm):
    """A norm without a stored weight. Ones replace the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        nn.Module.__init__(self)
        self.register_buffer("weight", torch.empty(dim), persistent=False)
        self.eps = eps


class NormedEmbedding(Embedding):
    """An embedding with a norm."""

    def __init__(self, config: MuseGlimmerConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.norm = UnitNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens_T: Tensor) -> Tensor:
        normed: Tensor = self.norm(super().forward(tokens_T))
        return normed


class MuseGlimmerAttention(Attention):
    """Attention with q and k norms, a query factor, and a gate on the output."""

    def __init__(self, config: MuseGlimmerConfig, window: int) -> None:
        super().__init__(config, window)
        self.q_norm = UnitNorm(config.head_dim, config.norm_eps)
        self.k_norm = UnitNorm(config.head_dim, config.norm_eps)
        self.gate_proj = Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.scale = config.query_factor * config.head_dim**-0.5

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attend(x, cos, sin)
        return self.o_proj(attended * torch.sigmoid(self.gate_proj(x)))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q_THD = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k_TGD = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TGD = rotate_half_split(q_THD, cos, sin), rotate_half_split(k_TGD, cos, sin)
        return ops.attention(q_THD, k_TGD, v_TGD, self.scale, self.window).flatten(-2)


class MuseGlimmerLayer(nn.Module):
    """Attention and feed-forward with norms before and after, added to the residual stream."""

    def __init__(self, config: MuseGlimmerConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.norm_eps)
        self.self_attn = MuseGlimmerAttention(config, config.window(layer))
        self.post_attention_layernorm = RMSNorm(hidden, config.post_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, config.norm_eps)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = RMSNorm(hidden, config.post_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed)


class MuseGlimmerModel(TwoRopesModel):
    """A normed embedding with Muse-Glimmer's layers."""

    @staticmethod
    def make_layer(config: MuseGlimmerConfig, layer: int) -> MuseGlimmerLayer:
        return MuseGlimmerLayer(config, layer)

    def __init__(self, config: MuseGlimmerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = NormedEmbedding(config)


class MuseGlimmerForCausalLM(TwoRopesForCausalLM):
    """Muse-Glimmer's text model with its head. Logits have a factor and a bound."""

    config: MuseGlimmerConfig
    model_class: ClassVar[type[Any]] = MuseGlimmerModel
    tensor_groups: Mapping[str, str] = {
        **LlamaForCausalLM.tensor_groups,
        "model.layers.*.self_attn.gate_proj": "wqkv",
    }

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        logits = super().forward(tokens_T, positions_T)
        factor, cap = self.config.logit_factor, self.config.logit_cap
        return (logits * (factor / cap)).tanh() * cap

    def sources(self) -> Sources:
        """Return the layers' norms. Files have them minus 1."""
        names = (name for name, _ in self.named_parameters() if name.endswith("layernorm.weight"))
        return {name: (TensorSource(name, offset=1.0),) for name in names}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        norms = {
            f"{name}.weight": torch.ones(module.weight.shape, dtype=torch.float32)
            for name, module in self.named_modules()
            if isinstance(module, UnitNorm)
        }
        return {**super().constants(max_context), **norms}


def read_hf(keys: Keys, config: MuseGlimmerConfig) -> MuseGlimmerConfig:
    """Add windows, layers without a rotation, and factors from config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    count = config.num_layers
    is_full = [(count - 1 - layer) % _INTERVAL == 0 for layer in range(count)]
    layer_types = keys.get("layer_types")
    if layer_types is None:
        layer_types = [FULL if full else SLIDING for full in is_full]
    layer_types = checked_types(keys, layer_types, count)
    keys.choice("hidden_activation", ("silu",), default="silu")
    return dataclasses.replace(
        config,
        windows=windows_by_type(keys, layer_types, config.max_positions),
        second_layers=_still_layers(keys, config, is_full),
        post_norm_eps=keys.real("post_norm_eps", 0.0, 1.0, default=1e-8),
        query_factor=keys.real("qk_scale_factor", 0.0, _MAX_FACTOR, default=3.87),
        logit_factor=keys.real("output_multiplier", 0.0, _MAX_FACTOR, default=0.19611613513818404),
        logit_cap=keys.real("final_logit_softcapping", 0.0, _MAX_FACTOR, default=20.0),
    )


def _still_layers(keys: Keys, config: MuseGlimmerConfig, is_full: list[bool]) -> tuple[int, ...]:
    """Return the layers without a rotation. A list has the bases, or 0."""
    theta = config.rope.theta
    bases: Any = keys.get("layer_rope_theta")
    if bases is None:
        return tuple(layer for layer, still in enumerate(is_full) if still)
    is_list = isinstance(bases, list) and len(bases) == config.num_layers
    if not is_list or any(base not in (0, theta) for base in bases):
        tail = f"allowed: {config.num_layers} of 0, {theta:g}"
        raise keys.error("layer_rope_theta", bases, tail)
    return tuple(layer for layer, base in enumerate(bases) if not base)


ARCHITECTURE = Architecture(
    MuseGlimmerForCausalLM,
    config=MuseGlimmerConfig,
    fixed={"mlp_bias": False},
    hf_defaults={
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
    },
    read_hf=read_hf,
    text_config=True,
)
