"""Qwen3.5 mixtures of experts (Qwen Team, 2026): Qwen3.5 with sparse blocks."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.moe import GGUF_NAMES as MOE_NAMES
from tilewright.models.architectures.moe import (
    TENSOR_GROUPS,
    mlp_of,
    sources_of_stacks,
)
from tilewright.models.architectures.qwen3_5 import (
    DEFAULTS,
    GGUF_NAMES,
    HybridLayer,
    HybridModel,
    Qwen35DraftLayer,
    Qwen35ForCausalLM,
)
from tilewright.models.checkpoints.spelling.delta import gguf_delta, hf_delta
from tilewright.models.checkpoints.spelling.experts import gguf_experts, hf_experts
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import HybridConfig
from tilewright.models.sources import Sources


class SparseHybridModel(HybridModel):
    """Attention and Gated DeltaNet layers with expert feed-forward blocks."""

    @staticmethod
    def make_layer(config: HybridConfig, layer: int) -> HybridLayer:
        return HybridLayer(config, layer, mlp_of(config, layer))


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """Qwen3.5's mixture with its head. Checkpoints stack a layer's experts in a tensor."""

    model_class = SparseHybridModel
    tensor_groups: Mapping[str, str] = {**Qwen35ForCausalLM.tensor_groups, **TENSOR_GROUPS}

    def sources(self) -> Sources:
        return {**super().sources(), **sources_of_stacks(self.config)}


class Qwen35MoeDraftLayer(Qwen35DraftLayer):
    """Qwen3.5 mixtures' draft layer, with its own experts."""

    model_class = Qwen35MoeForCausalLM


def read_hf(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Read config.json as `read_hf_sparse`. Selected experts' weights must sum to 1.

    Raises:
        CheckpointError: As `read_hf_sparse`, or the weights are not normalized.
    """
    return _renormalised(keys, "norm_topk_prob", read_hf_sparse(keys, config))


def read_gguf(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Read GGUF metadata as `read_gguf_sparse`. Selected experts' weights must sum to 1.

    Raises:
        CheckpointError: As `read_gguf_sparse`, or the weights are not normalized.
    """
    return _renormalised(keys, "expert_weights_norm", read_gguf_sparse(keys, config))


def _renormalised(keys: Keys, key: str, config: HybridConfig) -> HybridConfig:
    if not config.renormalise:
        raise keys.error(key, keys.get(key), "allowed: true")
    return config


def read_hf_sparse(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Add layer types and expert sizes from config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    found: HybridConfig = hf_experts(keys, hf_delta(keys, config))
    return found


def read_gguf_sparse(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Add layer types and expert sizes from GGUF metadata.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    found: HybridConfig = gguf_experts(keys, gguf_delta(keys, config))
    return found


DEFAULTS_MOE = {**DEFAULTS, "num_experts_per_tok": 8, "num_experts": 256}

ARCHITECTURE = Architecture(
    Qwen35MoeForCausalLM,
    config=HybridConfig,
    fixed={"qk_norm": True, "mlp_bias": False},
    hf_defaults={
        **DEFAULTS_MOE,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    has_partial_rotary=True,
    has_mrope=True,
    text_config=True,
    intermediate_key="moe_intermediate_size",
    experts="together",
    gguf_intermediate_key="expert_feed_forward_length",
    gguf_names={**GGUF_NAMES, **MOE_NAMES},
    gguf_norm_offset=1.0,
    draft_layer=Qwen35MoeDraftLayer,
    gguf_tiled_heads=True,
)
