"""SmolLM3 (Hugging Face, 2025): Llama without rotation in every fourth layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.two_ropes import TwoRopesForCausalLM
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import (
    FULL,
    SLIDING,
    checked_types,
    windows_by_type,
)
from tilewright.models.config import MAX_LAYERS, TwoRopesConfig

_INTERVAL = 4
"""Interval of layers without a rotation. GGUF files do not contain it."""


class SmolLM3ForCausalLM(TwoRopesForCausalLM):
    """SmolLM3 with its head."""


def read_hf(keys: Keys, config: TwoRopesConfig) -> TwoRopesConfig:
    """Read layers without rotation, and sliding windows, from config.json.

    Raises:
        CheckpointError: A list has a wrong length or an unknown value.
    """
    count = config.num_layers
    interval = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS, default=_INTERVAL)
    rotates: Any = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(count)]
    is_list = isinstance(rotates, list) and len(rotates) >= count
    if not is_list or any(type(value) is not int or value not in (0, 1) for value in rotates):
        raise keys.error("no_rope_layers", rotates, f"allowed: a list of {count} of 0, 1")
    still = tuple(layer for layer in range(count) if not rotates[layer])
    slides = keys.boolean("use_sliding_window", default=False)
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides and layer in still else FULL for layer in range(count)]
    kinds = checked_types(keys, kinds, count)
    windows: tuple[int, ...] = ()
    if slides and keys.get("sliding_window") is not None:
        windows = windows_by_type(keys, kinds, config.max_positions)
    return dataclasses.replace(config, second_layers=still, windows=windows)


def read_gguf(keys: Keys, config: TwoRopesConfig) -> TwoRopesConfig:
    """Add layers without a rotation: every fourth layer, as in llama.cpp."""
    still = range(_INTERVAL - 1, config.num_layers, _INTERVAL)
    return dataclasses.replace(config, second_layers=tuple(still))


ARCHITECTURE = Architecture(
    SmolLM3ForCausalLM,
    config=TwoRopesConfig,
    hf_defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    gguf_pairs_adjacent=True,
)
