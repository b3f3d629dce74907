"""gpt-oss (OpenAI, 2025): attention with sinks and biases, windows in alternating layers, experts
with biases and a clamped SwiGLU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import (
    Attention,
    DecoderLayer,
    Linear,
    rotate_half_split,
)
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.moe import TENSOR_GROUPS, chosen_by_softmax
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import (
    FULL,
    SLIDING,
    checked_types,
    windows_by_type,
)
from tilewright.models.config import MAX_EXPERTS, MAX_POSITIONS, MoeConfig


@dataclass(frozen=True, slots=True)
class GptOssConfig(MoeConfig):
    """Sizes and switches of a gpt-oss model.

    Attributes:
        swiglu_limit: Bound of gate and up.
        swiglu_alpha: Factor inside the sigmoid.
    """

    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702


class SinkAttention(Attention):
    """Attention with a learned score per head that has no value."""

    def __init__(self, config: GptOssConfig, window: int) -> None:
        super().__init__(config, window)
        self.sinks = nn.Parameter(torch.empty(config.num_heads))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_THD = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k_TGD = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v_TGD = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TGD = rotate_half_split(q_THD, cos, sin), rotate_half_split(k_TGD, cos, sin)
        scale = self.head_dim**-0.5
        o_THD = ops.attention(q_THD, k_TGD, v_TGD, scale, self.window, 0.0, self.sinks)
        return o_THD.flatten(-2)


class BiasedExpertLinear(nn.Module):
    """Weights ``[E, out, in]`` and biases ``[E, out, 1]`` for a matmul in every expert."""

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, num_outputs, 1))

    def forward(self, x: Tensor, experts_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        return ops.expert_linear(x, self.weight, experts_TK, weights_TK, self.bias)


class GptOssExperts(nn.Module):
    """Gated feed-forward blocks with a clamped SwiGLU. Each token selects its experts."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.gate_proj = BiasedExpertLinear(count, hidden, inner)
        self.up_proj = BiasedExpertLinear(count, hidden, inner)
        self.down_proj = BiasedExpertLinear(count, inner, hidden)
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha

    def forward(self, x: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate_TKI, up_TKI = self.gate_proj(x, experts_TK), self.up_proj(x, experts_TK)
        inner_TKI = ops.clamped_swiglu(gate_TKI, up_TKI, self.limit, self.alpha)
        return self.down_proj(inner_TKI, experts_TK, weights_TK)


class GptOssMLP(nn.Module):
    """A router with its experts. Weights of selected experts sum to 1."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.router = Linear(config.hidden_size, config.num_experts, bias=True)
        self.experts = GptOssExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        weights_TK, experts_TK = chosen_by_softmax(self.router(x), self.top_k, renormalise=True)
        out: Tensor = self.experts(x, experts_TK, weights_TK)
        return out


class GptOssModel(LlamaModel):
    """Llama's embedding and norm with gpt-oss's layers."""

    @staticmethod
    def make_layer(config: GptOssConfig, layer: int) -> DecoderLayer:
        made = DecoderLayer(config, mlp=GptOssMLP(config))
        made.self_attn = SinkAttention(config, config.window(layer))
        return made


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss with its head. Checkpoints present gate and up of all experts as separate tensors."""

    config: GptOssConfig
    model_class = GptOssModel
    tensor_groups: Mapping[str, str] = {
        **LlamaForCausalLM.tensor_groups,
        **TENSOR_GROUPS,
        "model.layers.*.mlp.router": "router",
    }


def read_hf(keys: Keys, config: GptOssConfig) -> GptOssConfig:
    """Add windows, experts and the clamp from config.json.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    kinds: Any = keys.get("layer_types")
    if kinds is None:
        kinds = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
    kinds = checked_types(keys, kinds, config.num_layers)
    count = keys.integer("num_local_experts", 2, MAX_EXPERTS)
    if keys.integer("num_experts", 2, MAX_EXPERTS, default=count) != count:
        other = keys.get("num_experts")
        raise keys.error("num_experts", other, f"allowed: as num_local_experts, {count}")
    key = "experts_per_token"
    chosen = keys.integer("num_experts_per_tok", 1, count, default=4)
    if keys.integer(key, 1, count, default=chosen) != chosen:
        raise keys.error(key, keys.get(key), f"allowed: as num_experts_per_tok, {chosen}")
    keys.integer("initial_context_length", 1, MAX_POSITIONS, default=4096)  # also in YaRN's section
    return dataclasses.replace(
        config,
        windows=windows_by_type(keys, kinds, config.max_positions),
        num_experts=count,
        experts_per_token=chosen,
        expert_size=config.intermediate_size,
        renormalise=True,
        swiglu_limit=keys.real("swiglu_limit", 0.0, 1e6, default=7.0),
        swiglu_alpha=keys.real("swiglu_alpha", 0.0, 1e6, default=1.702),
    )


ARCHITECTURE = Architecture(
    GptOssForCausalLM,
    config=GptOssConfig,
    hf_defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    read_hf=read_hf,
    experts="alternating",
)
