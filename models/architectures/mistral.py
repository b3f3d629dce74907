"""Mistral (Jiang et al., 2023): Llama whose attention may slide over a window in every layer.

Its GGUF files say that they are Llamas.
"""

from __future__ import annotations

import dataclasses

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.keys import Keys
from tilewright.models.checkpoints.windows import windows_of_all
from tilewright.models.config import ModelConfig


class MistralForCausalLM(LlamaForCausalLM):
    """All that differs stands in its `ModelConfig`."""


def read_hf(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The window, which every layer has."""
    windows = windows_of_all(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


ARCHITECTURE = Architecture(
    MistralForCausalLM,
    hf_defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    read_hf=read_hf,
    gguf_pairs_adjacent=True,
)
