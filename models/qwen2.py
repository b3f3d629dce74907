"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama whose q, k and v have biases."""

from __future__ import annotations

from models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """All that differs, the biases, stands in `ModelConfig` and in `models.architectures`."""
