"""Qwen3 (Yang et al., 2025): Llama with norms for q and k heads before rotation."""

from __future__ import annotations

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.spelling.windows import hf_windows_of_upper


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its head: a Llama with another `ModelConfig`."""


ARCHITECTURE = Architecture(
    Qwen3ForCausalLM,
    fixed={"qk_norm": True},
    hf_defaults={"head_dim": 128},
    read_hf=hf_windows_of_upper,
    gguf_names={"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
)
