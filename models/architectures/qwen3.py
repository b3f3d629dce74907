"""Qwen3 (Yang et al., 2025): Llama whose heads of q and k are normed before they turn."""

from __future__ import annotations

import dataclasses

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.keys import Keys
from tilewright.models.checkpoints.windows import windows_of_upper
from tilewright.models.config import ModelConfig


class Qwen3ForCausalLM(LlamaForCausalLM):
    """All that differs stands in its `ModelConfig`."""


def read_hf(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The windows of the upper layers, where they are switched on."""
    windows = windows_of_upper(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


ARCHITECTURE = Architecture(
    Qwen3ForCausalLM,
    fixed={"qk_norm": True},
    hf_defaults={"head_dim": 128},
    read_hf=read_hf,
    gguf_names={"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
)
