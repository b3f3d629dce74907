"""GLM-4.5, GLM-4.6 and GLM-4.7 (Z.ai, 2025): experts with a sigmoid router, and a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import DecoderLayer
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.moe import GGUF_NAMES, sources_by_expert
from tilewright.models.architectures.sigmoid_moe import (
    GROUPS,
    SigmoidMoeConfig,
    sigmoid_layer,
)
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_EXPERTS, MAX_WIDTH
from tilewright.models.sources import Sources

_SHARED = "shared_experts."
_MAX_SCALE = 1e6
_SIGMOID = 2
"""The value of GGUF's ``expert_gating_func`` for a sigmoid."""


class Glm4MoeModel(LlamaModel):
    """Llama's embedding and norm. Layers after the first have experts."""

    @staticmethod
    def make_layer(config: SigmoidMoeConfig, layer: int) -> DecoderLayer:
        return sigmoid_layer(config, layer)


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4.5 with its head. Checkpoints have a tensor per matmul and expert."""

    config: SigmoidMoeConfig
    model_class = Glm4MoeModel
    tensor_groups: Mapping[str, str] = {**LlamaForCausalLM.tensor_groups, **GROUPS}

    def sources(self) -> Sources:
        return sources_by_expert(self.config)


def read_hf(keys: Keys, config: SigmoidMoeConfig) -> SigmoidMoeConfig:
    """Add experts and the norms of q and k from config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    count = keys.integer("n_routed_experts", 2, MAX_EXPERTS)
    size = keys.integer("moe_intermediate_size", 1, MAX_WIDTH)
    num_dense = keys.integer("first_k_dense_replace", 0, config.num_layers, default=1)
    keys.choice("scoring_func", ("sigmoid",), default="sigmoid")
    return dataclasses.replace(
        config,
        qk_norm=keys.boolean("use_qk_norm", default=False),
        num_experts=count,
        experts_per_token=keys.integer("num_experts_per_tok", 1, count),
        expert_size=size,
        shared_size=size * keys.integer("n_shared_experts", 0, MAX_EXPERTS, default=1),
        renormalise=keys.boolean("norm_topk_prob", default=True),
        dense_layers=tuple(range(num_dense)),
        routed_scale=keys.real("routed_scaling_factor", 0.0, _MAX_SCALE, default=1.0),
    )


def read_gguf(keys: Keys, config: SigmoidMoeConfig) -> SigmoidMoeConfig:
    """Add experts from GGUF metadata. The norms of q and k are tensors.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    count = keys.integer("expert_count", 2, MAX_EXPERTS)
    size = keys.integer("expert_feed_forward_length", 1, MAX_WIDTH)
    num_dense = keys.integer("leading_dense_block_count", 0, config.num_layers, default=1)
    keys.integer("expert_gating_func", _SIGMOID, _SIGMOID, default=_SIGMOID)
    return dataclasses.replace(
        config,
        num_experts=count,
        experts_per_token=keys.integer("expert_used_count", 1, count),
        expert_size=size,
        shared_size=size * keys.integer("expert_shared_count", 0, MAX_EXPERTS, default=1),
        renormalise=keys.boolean("expert_weights_norm", default=True),
        dense_layers=tuple(range(num_dense)),
        routed_scale=keys.real("expert_weights_scale", 0.0, _MAX_SCALE, default=1.0),
    )


ARCHITECTURE = Architecture(
    Glm4MoeForCausalLM,
    config=SigmoidMoeConfig,
    fixed={"output_bias": False, "mlp_bias": False},
    hf_defaults={
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    has_partial_rotary=True,
    experts="apart",
    gguf_names={
        **{name: module.replace("shared_expert.", _SHARED) for name, module in GGUF_NAMES.items()},
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
)
