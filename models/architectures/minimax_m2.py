"""MiniMax-M2 (MiniMax, 2025): norms over all heads, a partial rotation, and experts with a sigmoid
router in every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.full_norms import FullNormAttention
from tilewright.models.architectures.layers import DecoderLayer
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.moe import TENSOR_GROUPS
from tilewright.models.architectures.sigmoid_moe import SigmoidMoeConfig, sigmoid_layer
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_EXPERTS
from tilewright.models.sources import Sources, TensorSource

_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class MiniMaxM2Model(LlamaModel):
    """Llama's embedding and norm with MiniMax-M2's layers."""

    @staticmethod
    def make_layer(config: SigmoidMoeConfig, layer: int) -> DecoderLayer:
        made = sigmoid_layer(config, layer)
        made.self_attn = FullNormAttention(config)
        return made


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """MiniMax-M2 with its head. Checkpoints have Mixtral's names of experts."""

    config: SigmoidMoeConfig
    model_class = MiniMaxM2Model
    tensor_groups: Mapping[str, str] = {**LlamaForCausalLM.tensor_groups, **TENSOR_GROUPS}

    def sources(self) -> Sources:
        sources: dict[str, tuple[TensorSource, ...]] = {}
        for layer in range(self.config.num_layers):
            path, stored = (f"model.layers.{layer}.{name}" for name in ("mlp", "block_sparse_moe"))
            bias = "e_score_correction_bias"
            sources[f"{path}.gate.weight"] = (TensorSource(f"{stored}.gate.weight"),)
            sources[f"{path}.gate.{bias}"] = (TensorSource(f"{stored}.{bias}"),)
            for matmul, name in _PARTS.items():
                sources[f"{path}.experts.{matmul}.weight"] = tuple(
                    TensorSource(f"{stored}.experts.{expert}.{name}.weight")
                    for expert in range(self.config.num_experts)
                )
        return sources


def read_hf(keys: Keys, config: SigmoidMoeConfig) -> SigmoidMoeConfig:
    """Add experts and the rotated channels from config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    count = keys.integer("num_local_experts", 2, MAX_EXPERTS)
    keys.choice("scoring_func", ("sigmoid",), default="sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        if not keys.boolean(key, default=True):
            raise keys.error(key, keys.get(key), "allowed: true")
    keys.choice("qk_norm_type", ("per_layer",), default="per_layer")
    keys.integer("shared_intermediate_size", 0, 0, default=0)
    attention_types: Any = keys.get("attn_type_list")
    if attention_types is not None and attention_types != [1] * config.num_layers:
        raise keys.error("attn_type_list", attention_types, f"allowed: {config.num_layers} of 1")
    return dataclasses.replace(
        config,
        rope=dataclasses.replace(config.rope, num_rotated=_num_rotated(keys, config)),
        num_experts=count,
        experts_per_token=keys.integer("num_experts_per_tok", 1, count),
        expert_size=config.intermediate_size,
    )


def _num_rotated(keys: Keys, config: SigmoidMoeConfig) -> int | None:
    """Return a head's rotated channels. Published files have them as ``rotary_dim``."""
    known = 2 * config.rope.num_pairs(config.head_dim)
    count = keys.integer("rotary_dim", 2, config.head_dim, default=known)
    is_partial = known != config.head_dim
    if count % 2 or (is_partial and count != known):
        tail = f"{known}, as partial_rotary_factor" if is_partial else "an even number"
        raise keys.error("rotary_dim", count, f"allowed: {tail}")
    return None if count == config.head_dim else count


ARCHITECTURE = Architecture(
    MiniMaxM2ForCausalLM,
    config=SigmoidMoeConfig,
    fixed={"attention_bias": False, "output_bias": False, "mlp_bias": False},
    hf_defaults={
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "rope_theta": 5000000.0,
    },
    read_hf=read_hf,
    has_partial_rotary=True,
)
