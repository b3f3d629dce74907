"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama whose q, k and v have biases."""

from __future__ import annotations

import dataclasses

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.keys import Keys
from tilewright.models.checkpoints.windows import windows_of_upper
from tilewright.models.config import ModelConfig


class Qwen2ForCausalLM(LlamaForCausalLM):
    """All that differs stands in its `ModelConfig`."""


def read_hf(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The windows of the upper layers, where they are switched on."""
    windows = windows_of_upper(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


ARCHITECTURE = Architecture(
    Qwen2ForCausalLM,
    fixed={"attention_bias": True, "output_bias": False},
    read_hf=read_hf,
)
