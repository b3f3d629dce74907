"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases for q, k and v."""

from __future__ import annotations

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.spelling.windows import hf_windows_of_upper


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with its head: a Llama with another `ModelConfig`."""


ARCHITECTURE = Architecture(
    Qwen2ForCausalLM,
    fixed={"attention_bias": True, "output_bias": False},
    read_hf=hf_windows_of_upper,
)
