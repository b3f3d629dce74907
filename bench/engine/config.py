"""The model of the contest of engines: sizes of its hidden model."""

from __future__ import annotations

from typing import Any

HIDDEN_LIKE: dict[str, Any] = {
    "model_type": "tiny_llama",
    "torch_dtype": "float16",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Configuration of the model whose speed has goals."""
