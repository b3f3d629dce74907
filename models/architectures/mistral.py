"""Mistral (Jiang et al., 2023) and the text model of Mistral Small 3: Llama with an optional window
in every layer.

Its GGUF files name the architecture ``llama``.
"""

from __future__ import annotations

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.spelling.windows import hf_windows_of_all


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral with its head: a Llama with another `ModelConfig`."""


ARCHITECTURE = Architecture(
    MistralForCausalLM,
    hf_defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    read_hf=hf_windows_of_all,
    text_config=True,
    gguf_pairs_adjacent=True,
)
