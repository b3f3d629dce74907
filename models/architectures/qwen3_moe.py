"""Qwen3's mixtures of experts (Yang et al., 2025): Qwen3 whose dense blocks are sparse."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import DecoderLayer
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.moe import (
    GGUF_NAMES,
    TENSOR_GROUPS,
    mlp_of,
    sources_by_expert,
)
from tilewright.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from tilewright.models.checkpoints.spelling.experts import gguf_experts, hf_experts
from tilewright.models.config import MoeConfig
from tilewright.models.sources import Sources


class Qwen3MoeModel(LlamaModel):
    """Llama's embedding and norm around layers whose feed-forward blocks have experts."""

    @staticmethod
    def make_layer(config: MoeConfig, layer: int) -> DecoderLayer:
        return DecoderLayer(config, config.window(layer), mlp_of(config, layer))


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3's mixture with its head; checkpoints have a tensor a product of each expert."""

    config: MoeConfig
    model_class = Qwen3MoeModel
    tensor_groups: Mapping[str, str] = {**LlamaForCausalLM.tensor_groups, **TENSOR_GROUPS}

    def sources(self) -> Sources:
        return sources_by_expert(self.config)


ARCHITECTURE = Architecture(
    Qwen3MoeForCausalLM,
    config=MoeConfig,
    fixed={"qk_norm": True},
    hf_defaults={**QWEN3.hf_defaults, "norm_topk_prob": False},
    read_hf=hf_experts,
    read_gguf=gguf_experts,
    experts="apart",
    gguf_names={**QWEN3.gguf_names, **GGUF_NAMES},
)
