"""Reads Gated DeltaNet settings from config.json and GGUF metadata, for any architecture."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import FULL
from tilewright.models.config import (
    MAX_CONV_WIDTH,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    DeltaShape,
    HybridConfig,
)

LINEAR = "linear_attention"
_LAYERS_A_FULL_ONE = 4


def hf_delta(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Return ``config`` with the layer types and sizes of Gated DeltaNet in config.json.

    Raises:
        CheckpointError: A layer type is not supported, or heads do not divide.
    """
    for key, only in (("attn_output_gate", True), ("output_gate_type", "swish")):
        if keys.get(key) not in (None, only):
            raise keys.error(key, keys.get(key), f"allowed: {json.dumps(only)}")
    every = keys.integer("full_attention_interval", 1, MAX_LAYERS, default=_LAYERS_A_FULL_ONE)
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(config.num_layers)]
    tail = f"allowed: {config.num_layers} of {FULL}, {LINEAR}"
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise keys.error("layer_types", kinds, tail)
    for kind in kinds:
        if kind not in (FULL, LINEAR):
            raise keys.error("layer_types", kind, tail)
    delta = DeltaShape(
        num_key_heads=keys.integer("linear_num_key_heads", 1, MAX_HEADS),
        num_value_heads=keys.integer("linear_num_value_heads", 1, MAX_HEADS),
        key_dim=keys.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=keys.integer("linear_conv_kernel_dim", 2, MAX_CONV_WIDTH, default=4),
    )
    _check_heads(keys, "linear_num_value_heads", delta)
    linear = tuple(kind == LINEAR for kind in kinds)
    return dataclasses.replace(config, linear_layers=linear, delta=delta)


def _check_heads(keys: Keys, key: str, delta: DeltaShape) -> None:
    if delta.num_value_heads % delta.num_key_heads:
        tail = f"allowed: a multiple of the {delta.num_key_heads} key heads"
        raise keys.error(key, delta.num_value_heads, tail)


def gguf_delta(keys: Keys, config: HybridConfig) -> HybridConfig:
    """Return ``config`` with the layer types and sizes of Gated DeltaNet in GGUF metadata.

    Raises:
        CheckpointError: Heads do not divide, or a layer has no type.
    """
    num_values = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
    inner = keys.integer("ssm.inner_size", 1, MAX_HEADS * MAX_HEAD_DIM)
    if inner % num_values or inner // num_values > MAX_HEAD_DIM:
        tail = f"allowed: a multiple of the {num_values} value heads, up to {MAX_HEAD_DIM} of each"
        raise keys.error("ssm.inner_size", inner, tail)
    delta = DeltaShape(
        num_key_heads=keys.integer("ssm.group_count", 1, MAX_HEADS),
        num_value_heads=num_values,
        key_dim=keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        value_dim=inner // num_values,
        conv_width=keys.integer("ssm.conv_kernel", 2, MAX_CONV_WIDTH),
    )
    _check_heads(keys, "ssm.time_step_rank", delta)
    every = keys.integer("full_attention_interval", 1, MAX_LAYERS, default=_LAYERS_A_FULL_ONE)
    linear = tuple((layer + 1) % every != 0 for layer in range(config.num_layers))
    said: Any = keys.get("attention.recurrent_layers")
    if said is not None:
        given = said.tolist() if hasattr(said, "tolist") else said
        if not isinstance(given, list) or len(given) < config.num_layers:
            tail = f"allowed: a list of true and false, for each of {config.num_layers} layers"
            raise keys.error("attention.recurrent_layers", given, tail)
        linear = tuple(map(bool, given[: config.num_layers]))
    return dataclasses.replace(config, linear_layers=linear, delta=delta)
