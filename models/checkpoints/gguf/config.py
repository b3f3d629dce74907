"""A model's configuration from GGUF metadata. Reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.models.architectures.table import architecture_of, find_gguf_type
from tilewright.models.checkpoints.spelling.keys import Keys, read_head_dim, read_kv_heads
from tilewright.models.checkpoints.spelling.rope import gguf_rope, longer_context
from tilewright.models.config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    ModelConfig,
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "router_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
}
"""Keys of GGUF metadata that change the arithmetic, with the values that leave it as it is: others
are refused where the architecture does not read the key."""


def config_of_gguf(metadata: Mapping[str, object], *, where: Path | str) -> ModelConfig:
    """Return the configuration in the metadata of the GGUF file ``where``.

    Tied embeddings, biases and frequency factors are visible only in the tensors, so the reader
    adds them later. Until then, embeddings are tied and only fixed biases exist.

    Raises:
        CheckpointError: A key is missing, out of range or not supported.
    """
    name = metadata.get("general.architecture")
    model_type = find_gguf_type(name, f"{where}: general.architecture")
    architecture = architecture_of(model_type)
    keys = Keys(metadata, where, prefix=f"{name}.")
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    num_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = read_head_dim(keys, "attention.key_length", hidden, num_heads)
    key = "attention.value_length"
    if keys.integer(key, 1, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise keys.error(key, keys.get(key), f"allowed: the head size, {head_dim}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) and tokens else None
    read: dict[str, Any] = {
        "name": Path(where).stem,
        "model_type": model_type,
        "vocab_size": keys.integer("vocab_size", 1, MAX_VOCAB, default=num_tokens),
        "hidden_size": hidden,
        "intermediate_size": keys.integer(architecture.gguf_intermediate_key, 1, MAX_WIDTH),
        "num_layers": _num_layers(keys),
        "num_heads": num_heads,
        "num_kv_heads": read_kv_heads(keys, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_positions": keys.integer("context_length", 1, MAX_POSITIONS),
        "norm_eps": keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope": gguf_rope(
            keys,
            head_dim,
            partial=architecture.has_partial_rotary,
            mrope=architecture.has_mrope,
        ),
        "tie_embeddings": True,
    }
    read["max_positions"] = longer_context(read["rope"], read["max_positions"])
    config = (architecture.config or ModelConfig)(**{**read, **architecture.fixed})
    if architecture.read_gguf is not None:
        config = architecture.read_gguf(keys, config)
    keys.refuse_unread(_NEUTRAL)
    assert isinstance(config, ModelConfig)
    return config


def _num_layers(keys: Keys) -> int:
    """How many layers there are without those at the end that only draft tokens."""
    count = keys.integer("block_count", 1, MAX_LAYERS)
    return count - keys.integer("nextn_predict_layers", 0, count - 1, default=0)
