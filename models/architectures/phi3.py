"""Phi-3 and Phi-3.5 (Abdin et al., 2024): Llama with LongRoPE and stacked q, k, v and gate, up."""

from __future__ import annotations

import dataclasses

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import hf_windows_of_all
from tilewright.models.config import MAX_POSITIONS, ModelConfig
from tilewright.models.sources import Sources, TensorSource


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with its head: a Llama with q, k, v and gate, up in shared tensors."""

    def sources(self) -> Sources:
        config = self.config
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        found = {}
        for layer in range(config.num_layers):
            for module, tensor, parts in (
                ("self_attn", "qkv_proj", {"q": q_rows, "k": kv_rows, "v": kv_rows}),
                ("mlp", "gate_up_proj", {"gate": inner, "up": inner}),
            ):
                path, first = f"model.layers.{layer}.{module}", 0
                for part, num_rows in parts.items():
                    rows = (first, first + num_rows)
                    source = TensorSource(f"{path}.{tensor}.weight", rows)
                    found[f"{path}.{part}_proj.weight"] = (source,)
                    first += num_rows
        return found


def read_gguf(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return ``config`` with the attention window from GGUF metadata for all layers.

    Raises:
        CheckpointError: The window is no integer from 0.
    """
    window = keys.integer("attention.sliding_window", 0, MAX_POSITIONS, default=0)
    windows = (window,) * config.num_layers if 0 < window < config.max_positions else ()
    return dataclasses.replace(config, windows=windows)


ARCHITECTURE = Architecture(
    Phi3ForCausalLM,
    hf_defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    read_hf=hf_windows_of_all,
    read_gguf=read_gguf,
    has_partial_rotary=True,
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
