"""Reads expert settings from config.json and GGUF metadata, for any architecture."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH


def hf_experts(keys: Keys, config: Any) -> Any:
    """Return ``config`` with the expert sizes in config.json, and the layers with experts.

    Raises:
        CheckpointError: A key is missing or invalid, or a layer does not exist.
    """
    key = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    count = keys.integer(key, 2, MAX_EXPERTS)
    if keys.integer("num_local_experts", 2, MAX_EXPERTS, default=count) != count:
        other = keys.get("num_local_experts")
        raise keys.error("num_local_experts", other, f"allowed: as num_experts, {count}")
    step = keys.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    layers = range(config.num_layers)
    dense: Any = keys.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(i) is not int or i not in layers for i in dense):
        tail = f"allowed: a list of layers from 0 to {config.num_layers - 1}"
        raise keys.error("mlp_only_layers", dense, tail)
    return dataclasses.replace(
        config,
        num_experts=count,
        experts_per_token=keys.integer("num_experts_per_tok", 1, count),
        expert_size=keys.integer("moe_intermediate_size", 1, MAX_WIDTH),
        shared_size=keys.integer("shared_expert_intermediate_size", 0, MAX_WIDTH, default=0),
        renormalise=keys.boolean("norm_topk_prob", default=True),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )


def gguf_experts(keys: Keys, config: Any) -> Any:
    """Return ``config`` with the expert sizes in GGUF metadata. Every layer has experts.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    count = keys.integer("expert_count", 2, MAX_EXPERTS)
    return dataclasses.replace(
        config,
        num_experts=count,
        experts_per_token=keys.integer("expert_used_count", 1, count),
        expert_size=keys.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        shared_size=keys.integer("expert_shared_feed_forward_length", 0, MAX_WIDTH, default=0),
        renormalise=keys.boolean("expert_weights_norm", default=True),
    )
